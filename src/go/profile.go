package kvatlas

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

const (
	addressBytesMax    = 256
	labelsMax          = 16
	labelKeyBytesMax   = 64
	labelValueBytesMax = 128
	labelsBytesMax     = 512
)

// A profile is what a batch tells of a holder beside its blocks.
type profile struct {
	address string
	labels  map[string]string
}

// put writes both, as a batch with either tells both: an empty address without labels takes back what was told.
func (p *profile) put(entries fields) {
	if p == nil {
		return
	}
	if p.address != "" || len(p.labels) == 0 {
		entries["address"] = p.address
	}
	if len(p.labels) > 0 {
		entries["labels"] = p.labels
	}
}

// checkAddress refuses what a daemon takes for no address: it drops every batch with one.
func checkAddress(address string) error {
	rest, needsPort := address, true
	for _, scheme := range []string{"http://", "https://", "grpc://", "grpcs://"} {
		if strings.HasPrefix(address, scheme) {
			rest, needsPort = address[len(scheme):], false
		}
	}
	authority, path := rest, ""
	if slash := strings.IndexByte(rest, '/'); slash >= 0 && !needsPort {
		authority, path = rest[:slash], rest[slash:]
	}
	if len(address) > addressBytesMax || !isAuthority(authority, needsPort) || !isOf(path, "/.-_~%") {
		return fmt.Errorf("%w: Address %q is neither HOST:PORT nor a URL with http, https, grpc or grpcs", ErrInvalid, address)
	}
	return nil
}

// isAuthority says whether a text is a host with a port, which may be missing.
func isAuthority(text string, needsPort bool) bool {
	host, port, hasPort := strings.Cut(text, ":")
	isHost := host != "" && isOf(host, ".-_")
	if strings.HasPrefix(text, "[") {
		end := strings.IndexByte(text, ']')
		if end < 0 {
			return false
		}
		address, err := netip.ParseAddr(text[1:end])
		isHost = err == nil && address.Is6() && address.Zone() == ""
		host, port, hasPort = strings.Cut(text[end+1:], ":")
		isHost = isHost && host == ""
	}
	if !hasPort {
		return isHost && !needsPort
	}
	number, err := strconv.ParseUint(port, 10, 16)
	return isHost && isOf(port, "") && err == nil && number > 0
}

// isOf says whether a text has only letters and digits of ASCII, and these characters.
func isOf(text, others string) bool {
	for _, char := range []byte(text) {
		isLetter := char >= 'A' && char <= 'Z' || char >= 'a' && char <= 'z'
		if !isLetter && !(char >= '0' && char <= '9') && strings.IndexByte(others, char) < 0 {
			return false
		}
	}
	return true
}

// checkLabels refuses labels that a daemon does not take: it drops every batch with them.
func checkLabels(labels map[string]string) error {
	if len(labels) > labelsMax {
		return fmt.Errorf("%w: there are %d Labels; at most %d are allowed", ErrInvalid, len(labels), labelsMax)
	}
	size := 0
	for key, value := range labels {
		if key == "" || len(key) > labelKeyBytesMax || !isOf(key, "._-/") {
			return fmt.Errorf("%w: the label %q is not 1 to %d characters out of A-Z a-z 0-9 . _ - /", ErrInvalid, key, labelKeyBytesMax)
		}
		if len(value) > labelValueBytesMax || strings.IndexFunc(value, isUnprintable) >= 0 {
			return fmt.Errorf("%w: the value of the label %q is not at most %d printable characters of ASCII", ErrInvalid, key, labelValueBytesMax)
		}
		size += len(key) + len(value)
	}
	if size > labelsBytesMax {
		return fmt.Errorf("%w: the Labels have %d bytes; at most %d are allowed", ErrInvalid, size, labelsBytesMax)
	}
	return nil
}

func isUnprintable(char rune) bool { return char < ' ' || char > '~' }
