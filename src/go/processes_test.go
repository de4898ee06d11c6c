package kvatlas

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// patience is how long a test waits for what has to come.
const patience = 30 * time.Second

// program finds a program to test against; a test without it is left out, which CI does not allow.
func program(t *testing.T, variable string, places ...string) string {
	t.Helper()
	if named := os.Getenv(variable); named != "" {
		return named
	}
	for _, place := range places {
		if found, err := exec.LookPath(place); err == nil {
			if whole, err := filepath.Abs(found); err == nil {
				return whole
			}
		}
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("nothing to test against: name a binary in %s", variable)
	}
	t.Skipf("NOT TESTED: name a binary in %s", variable)
	return ""
}

// process is a program that is killed at the end of its test.
type process struct {
	t     *testing.T
	child *exec.Cmd
}

func (p *process) spawn(program string, arguments ...string) {
	p.t.Helper()
	p.child = exec.Command(program, arguments...)
	// A daemon takes no other settings than a test's own.
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "KVATLAS_") {
			p.child.Env = append(p.child.Env, entry)
		}
	}
	p.child.Stderr = os.Stderr
	if err := p.child.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(p.kill)
}

func (p *process) kill() {
	if p.child != nil {
		_ = p.child.Process.Kill()
		_ = p.child.Wait()
		p.child = nil
	}
}

// broker is a nats-server on a port of its own.
type broker struct {
	process
	address, directory string
}

// startBroker starts a nats-server, and gives its address.
func startBroker(t *testing.T, lines ...string) string {
	t.Helper()
	return newBroker(t, lines...).address
}

func newBroker(t *testing.T, lines ...string) *broker {
	t.Helper()
	b := &broker{process: process{t: t}, directory: t.TempDir()}
	b.configure(lines)
	b.spawn(program(t, "NATS_SERVER_BIN", "nats-server", "../../.tools/nats-server"), "-a", "127.0.0.1", "-p", "-1",
		"-c", filepath.Join(b.directory, "nats.conf"), "--ports_file_dir", b.directory, "-l", filepath.Join(b.directory, "log"))
	eventually(t, "the broker tells its port", func() bool {
		files, _ := filepath.Glob(filepath.Join(b.directory, "*.ports"))
		for _, file := range files {
			var ports struct{ Nats []string }
			if text, err := os.ReadFile(file); err != nil || json.Unmarshal(text, &ports) != nil || len(ports.Nats) == 0 {
				continue
			}
			if found, err := url.Parse(ports.Nats[0]); err == nil {
				b.address = "nats://127.0.0.1:" + found.Port()
			}
		}
		return b.address != ""
	})
	return b
}

func (b *broker) configure(lines []string) {
	b.t.Helper()
	text := "debug = false\n" + strings.Join(lines, "\n")
	if err := os.WriteFile(filepath.Join(b.directory, "nats.conf"), []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// reload has it take another configuration; its connections stay, as far as that allows them.
func (b *broker) reload(lines ...string) {
	b.t.Helper()
	reloads := func() int {
		text, _ := os.ReadFile(filepath.Join(b.directory, "log"))
		return strings.Count(string(text), "Reloaded server configuration")
	}
	before := reloads()
	b.configure(lines)
	if err := b.child.Process.Signal(syscall.SIGHUP); err != nil {
		b.t.Fatal(err)
	}
	eventually(b.t, "the broker has taken its configuration", func() bool { return reloads() > before })
}

// daemon is `kvatlas serve`. What it knew before a start it has forgotten.
type daemon struct {
	process
	program, address string
}

func newDaemon(t *testing.T, address string) *daemon {
	t.Helper()
	return &daemon{process{t: t}, program(t, "KVATLAS_BIN", "../../target/debug/kvatlas"), address}
}

// start has settings with which a daemon asks soon again, and counts no busy machine as a slow broker or a silent publisher.
func (d *daemon) start() {
	d.t.Helper()
	arguments := []string{"serve", "--nats-url", d.address, "--admin-listen", "off", "--logging-level", "error"}
	for key, milliseconds := range map[string]int{
		"resync-retry-min-ms": 10, "resync-retry-max-ms": 200, "resync-timeout-ms": 2000, "events-behind-after-ms": 30000,
		"namespace-defaults-stale-after-ms": 30000,
	} {
		arguments = append(arguments, "--"+key, fmt.Sprint(milliseconds))
	}
	d.spawn(d.program, arguments...)
}

// eventually waits until something holds.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for interval := 2 * time.Millisecond; !holds(); time.Sleep(interval) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		if interval < 50*time.Millisecond {
			interval += interval / 2
		}
	}
}

func connect(t *testing.T, address string) *nats.Conn {
	t.Helper()
	connection, err := nats.Connect(address, nats.MaxReconnects(-1), nats.ReconnectWait(500*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(connection.Close)
	return connection
}
