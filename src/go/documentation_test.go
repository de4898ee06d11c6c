package kvatlas

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The program in README.md runs as it stands.
func TestProgramInReadmeRuns(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```go\n")
	source, _, is := strings.Cut(rest, "```")
	if !is {
		t.Fatal("README.md has no program")
	}
	if !strings.Contains(source, "nats.IgnoreAuthErrorAbort()") {
		t.Error("its connection does not outlast a password that is wrong for a while")
	}
	w := newWorld(t)
	directory := t.TempDir()
	file, built := filepath.Join(directory, "main.go"), filepath.Join(directory, "program")
	w.must(os.WriteFile(file, []byte(source), 0o600))
	if said, err := exec.Command("go", "build", "-o", built, file).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	said, err := exec.Command(built, w.daemon.address).CombinedOutput()
	if err != nil || string(said) != "gpu-0 can reuse 3 of 4 blocks\n" {
		t.Errorf("%v: %s", err, said)
	}
}
