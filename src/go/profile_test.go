package kvatlas

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestAddressesAreTheContracts(t *testing.T) {
	for _, address := range []string{
		"", "host:80", "10.0.0.7:8000", "h_1.x:1", "[fd00::7]:8000", "[::ffff:10.0.0.7]:1", "http://host",
		"https://h/v1", "grpc://[::1]:1", "grpcs://h:1/a%20b",
	} {
		if _, err := (PublisherOptions{Address: address}).completed(0); err != nil {
			t.Errorf("%q: %v", address, err)
		}
	}
	for _, address := range []string{
		"host", "10.0.0.7", ":80", "host:", "host:0", "host:65536", "host:+1", "host:80/", "host:80\n", "[host]:80",
		"[fe80::1%eth0]:80", "[10.0.0.7]:80", "[::1]", "[::1", "[::1]x:80", "ftp://host:80", "http://user@host:80", "http://host/?a",
		"http://", "h\u00e4:80", strings.Repeat("h", 255) + ":1",
	} {
		if _, err := (PublisherOptions{Address: address}).completed(0); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", address, err)
		}
	}
}

func TestLabelsAreTheContracts(t *testing.T) {
	many, long := map[string]string{}, map[string]string{}
	for number := 0; number < 16; number++ {
		many[fmt.Sprint("a.b/c_", number)] = "~ !"
	}
	given, err := PublisherOptions{Labels: many}.completed(0)
	if err != nil {
		t.Fatal(err)
	}
	many["another"] = ""
	same(t, "labels apart from the caller's", len(given.Labels), 16)
	for number := 0; number < 5; number++ {
		long[fmt.Sprint(number)] = strings.Repeat("x", 128)
	}
	for name, labels := range map[string]map[string]string{
		"too many":        many,
		"too long":        long,
		"no key":          {"": "x"},
		"a long key":      {strings.Repeat("k", 65): ""},
		"a foreign key":   {"a b": ""},
		"a long value":    {"a": strings.Repeat("x", 129)},
		"a foreign value": {"a": "\u00e4"},
		"a control code":  {"a": "\x1b"},
		"a broken value":  {"a": "\xff"},
	} {
		if _, err := (PublisherOptions{Labels: labels}).completed(0); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
