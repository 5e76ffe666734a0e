//go:build browser

package browsertest

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// tabTo presses Tab until an element has the focus, which must then be seen.
func (b *tab) tabTo(selector string) {
	b.t.Helper()
	const most = 80
	for range most {
		b.press("Tab")
		var there bool
		b.must(b.Eval(b.ctx, `document.activeElement.matches(`+quote(selector)+`)`, &there))
		if !there {
			continue
		}
		if seen := b.str(`(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle + ' ' + s.outlineWidth })()`); !strings.HasPrefix(seen, "solid 2px") && !strings.HasPrefix(seen, "auto") {
			b.t.Errorf("the focus on %s is not seen: its outline is %s", selector, seen)
		}
		return
	}
	b.t.Fatalf("Tab does not come to %s within %d steps; it is at %s", selector, most, b.str(`document.activeElement.outerHTML.slice(0, 200)`))
}

// keys presses the keys of a text.
func (b *tab) keys(text string) {
	b.t.Helper()
	b.must(b.Keys(b.ctx, text))
}

// fits checks that nothing is wider than the screen, but for what scrolls by itself.
func (b *tab) fits(what string) {
	b.t.Helper()
	if wide := b.str(`document.documentElement.scrollWidth > innerWidth ? [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll')).slice(0, 5).map((e) => e.outerHTML.slice(0, 160)).join('\n') || 'something' : ''`); wide != "" {
		b.t.Errorf("%s is wider than the screen: %s", what, wide)
	}
}

// both shoots a view in the light and in the dark.
func (b *tab) both(name string) {
	b.t.Helper()
	b.scheme(false)
	b.shot(name)
	b.scheme(true)
	b.shot(name + "-dark")
	b.scheme(false)
}

// runNet runs a sandbox with a network and a policy.
func (h *host) runNet(t *testing.T, name string, p *netpolicy.Policy) {
	t.Helper()
	if _, err := h.Create(t.Context(), records.Request{Spec: sandbox.Spec{Name: name, Image: sandboxtest.Image, MemoryMiB: 256, Network: spec.NetworkTAP, Policy: p}}); err != nil {
		t.Fatal(err)
	}
}

// Ports of the agent: docs/ARCHITECTURE.md.
const agentPort, forwardPort = 1024, 1025

// keepers are guests whose processes outlive sleeps, as those of VMs do: VMs.Guests.
type keepers struct {
	t        *testing.T
	commands map[string]fakeguest.Command

	mu   sync.Mutex // guards from
	from map[string]*keeper
}

// keeper is a guest that goes on while its VM sleeps.
type keeper struct {
	of    *keepers
	path  string
	ports *fakeguest.Ports
	done  chan struct{}
}

func (k *keepers) start(_, from string, copied bool) (sandboxtest.Guest, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if g := k.from[from]; g != nil && !copied {
		return g, nil
	}
	dir, err := os.MkdirTemp("", "keep")
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "vsock.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	g := fakeguest.New(nil)
	g.Commands = k.commands
	out := &keeper{of: k, path: path, ports: fakeguest.Listen(l, agentPort, forwardPort), done: make(chan struct{})}
	g.Shutdown = func(bool) { close(out.done) }
	served := make(chan error, 1)
	go func() { served <- g.Serve(out.ports) }()
	k.t.Cleanup(func() {
		_ = out.ports.Close()
		<-served
		_ = os.RemoveAll(dir)
	})
	return out, nil
}

func (g *keeper) Dial(port int) (net.Conn, error) {
	return guest.UnixDialer(g.path)(context.Background(), uint32(port))
}

func (g *keeper) Capture(id string, _ bool) error {
	g.of.mu.Lock()
	defer g.of.mu.Unlock()
	g.of.from[id] = g
	return nil
}

func (g *keeper) Done() <-chan struct{} { return g.done }

func (g *keeper) Close() error {
	g.ports.Cut()
	return nil
}

// shell is a program for terminals: it echoes what is typed, and knows some words.
func shell(ctx context.Context, p *fakeguest.Process) int {
	say := func(text string) { _, _ = io.WriteString(p.Stdout, text) }
	typed := make(chan byte)
	go func() {
		defer close(typed)
		buf := make([]byte, 4096)
		for {
			n, err := p.Stdin.Read(buf)
			for _, c := range buf[:n] {
				select {
				case typed <- c:
				case <-ctx.Done():
					return
				}
			}
			if err != nil {
				return
			}
		}
	}()
	size := p.TTY
	say("$ ")
	var line []byte
	for {
		select {
		case <-ctx.Done():
			return 1
		case size = <-p.Resized:
		case c, ok := <-typed:
			switch {
			case !ok:
				return 0
			case c != '\r':
				line = append(line, c)
				_, _ = p.Stdout.Write([]byte{c})
				continue
			}
			say("\r\n")
			word, rest, _ := strings.Cut(string(line), " ")
			line = nil
			switch word {
			case "exit":
				return 3
			case "size":
				// What comes late counts too.
				select {
				case size = <-p.Resized:
				default:
				}
				say(fmt.Sprintf("size %dx%d\r\n", size.GetRows(), size.GetCols()))
			case "title":
				say("\x1b]0;" + rest + "\x07titled\r\n")
			case "colors":
				say("\x1b[38;2;10;200;30;48;2;90;0;90mtrue\x1b[0m \x1b[31mred\x1b[0m \x1b[1;4;9mmuch\x1b[0m \x1b]8;;javascript:window.pwned=1\x07link\x1b]8;;\x07\r\n")
			case "ask":
				say("\x1b[c\x1b[6nasked\r\n") // a terminal answers these
			case "count":
				for i := range 2000 {
					say(fmt.Sprintf("line %d\r\n", i))
				}
			}
			say("$ ")
		}
	}
}

func quoteInt(n int) string { return fmt.Sprint(n) }
