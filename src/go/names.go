package kvatlas

import (
	"fmt"
	"strings"
)

// DefaultPrefix is what every subject begins with unless configured otherwise.
const DefaultPrefix = "kvatlas"

const nameBytesMax = 64

// checkName refuses what can be no namespace, no worker and no token of a prefix.
func checkName(what, name string) error {
	if len(name) < 1 || len(name) > nameBytesMax || strings.IndexFunc(name, isForeign) >= 0 {
		return fmt.Errorf("%w: %s %q is not 1 to 64 characters out of A-Z a-z 0-9 _ -", ErrInvalid, what, name)
	}
	return nil
}

func isForeign(char rune) bool {
	return !isPlain(char) && char != '_'
}

func isPlain(char rune) bool {
	return char >= 'A' && char <= 'Z' || char >= 'a' && char <= 'z' || char >= '0' && char <= '9' || char == '-'
}

// subjects make the subjects under one prefix.
type subjects struct{ prefix string }

func newSubjects(prefix string) (subjects, error) {
	if prefix == "" {
		prefix = DefaultPrefix
	}
	if len(prefix) > nameBytesMax {
		return subjects{}, fmt.Errorf("%w: the prefix %q has more than 64 bytes", ErrInvalid, prefix)
	}
	for _, token := range strings.Split(prefix, ".") {
		if err := checkName("prefix", token); err != nil {
			return subjects{}, err
		}
	}
	return subjects{prefix}, nil
}

// scoped is the subject of one kind in a namespace.
func (s subjects) scoped(kind, namespace string) (string, error) {
	if err := checkName("namespace", namespace); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s.v1.%s.%s", s.prefix, kind, namespace), nil
}

// ofWorker is the subject of one kind that belongs to a worker.
func (s subjects) ofWorker(kind, namespace, worker string) (string, error) {
	subject, err := s.scoped(kind, namespace)
	if err != nil {
		return "", err
	}
	if err := checkName("worker", worker); err != nil {
		return "", err
	}
	return subject + "." + worker, nil
}

// ModelNamespace is the namespace of a model, by the name under which it is served. The tenant may be empty, or "default". Adapters share
// the namespace of their base model.
func ModelNamespace(model, tenant string) (string, error) {
	if model == "" {
		return "", fmt.Errorf("%w: a model must have a name", ErrInvalid)
	}
	name := mangled(model)
	if tenant != "" && tenant != "default" {
		name += "_t" + mangled(tenant)
	}
	return name, checkName("the namespace of the model", name)
}

// InstanceWorker is the worker that a gateway calls instance, such as http://10.0.0.1:8000.
func InstanceWorker(instance string) (string, error) {
	name := mangled(instance)
	return name, checkName("the worker of the instance", name)
}

// mangled writes a text as part of a name. "_" begins a code; nothing else means anything but itself.
func mangled(text string) string {
	var name strings.Builder
	for _, char := range []byte(text) {
		switch {
		case isPlain(rune(char)):
			name.WriteByte(char)
		case char == '/':
			name.WriteString("__")
		case char == '.':
			name.WriteString("_d")
		case char == '_':
			name.WriteString("_u")
		case char == ':':
			name.WriteString("_c")
		default:
			fmt.Fprintf(&name, "_x%02x", char)
		}
	}
	return name.String()
}
