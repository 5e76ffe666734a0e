package vsock

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// otherEnv makes this test binary run as another process than the device's. Its value is "dial" or "listen", a path,
// and a line to begin with.
const otherEnv = "DROWSE_TEST_VSOCK_OTHER"

func TestMainOfAnotherProcess(*testing.T) {
	words := strings.SplitN(os.Getenv(otherEnv), " ", 3)
	switch words[0] {
	case "dial":
		c, err := net.Dial("unix", words[1])
		if err != nil {
			panic(err)
		}
		fmt.Fprintln(c, words[2])
		fmt.Println("ready")
	case "listen":
		l, err := net.Listen("unix", words[1])
		if err != nil {
			panic(err)
		}
		fmt.Println("ready")
		if _, err := l.Accept(); err != nil {
			panic(err)
		}
	default:
		return
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// other starts another process. The returned function ends it.
func other(t *testing.T, what ...string) (end func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMainOfAnotherProcess$")
	cmd.Env = append(os.Environ(), otherEnv+"="+strings.Join(what, " "))
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}
	return func() {
		in.Close()
		_ = cmd.Wait()
	}
}

func TestUses_are_connections_of_other_processes_that_do_not_say_that_they_are_idle(t *testing.T) {
	for _, tc := range []struct {
		name string
		open func(g *guest) (end func())
		want uint64
	}{
		{"a client of another process", func(g *guest) func() {
			end := other(t, "dial", g.path, "CONNECT 5")
			g.receive(opRequest)
			return end
		}, 1},
		{"a client of another process that is idle", func(g *guest) func() {
			end := other(t, "dial", g.path, "CONNECT 5 idle")
			g.receive(opRequest)
			return end
		}, 0},
		{"a client of this process", func(g *guest) func() {
			c, _ := g.connect(5)
			return func() { c.Close() }
		}, 0},
		{"a listener of another process", func(g *guest) func() {
			end := other(t, "listen", g.path+"_7", "")
			s := &stream{g: g, local: 9, remote: 7}
			s.send(opRequest, 0)
			g.receive(opResponse)
			return func() {
				end()
				s.send(opReset, 0)
			}
		}, 1},
		{"a listener of this process", func(g *guest) func() {
			c, _ := g.open(9, 7)
			return func() { c.Close() }
		}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := newGuest(t, 16)
			end := tc.open(g)
			if st := g.dev.Stats(); st.Open.Load() != tc.want || st.Uses.Load() != tc.want {
				t.Errorf("open %d, ever %d, want %d", st.Open.Load(), st.Uses.Load(), tc.want)
			}
			end()
			g.wait("the connection is gone", func() bool { return g.dev.Stats().Open.Load() == 0 })
			if st := g.dev.Stats(); st.Uses.Load() != tc.want {
				t.Errorf("%d uses afterwards, want %d", st.Uses.Load(), tc.want)
			}
		})
	}
}
