package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// errLeft means that the user has detached from a command, which runs on.
var errLeft = errors.New("detached")

// patience is how many signals are passed to a command before the next one ends its session.
const patience = 2

// atTerminal runs a session with the streams of this process, and with its terminal if tty is set. It returns errLeft
// if the user types keys. Signals go to the command; a terminal in raw mode sends Ctrl-C and Ctrl-\ as bytes.
func (a *app) atTerminal(ctx context.Context, tty, stdin bool, keys []byte, start func(context.Context, streams, *wire.TTY) (session, error)) (*exit, error) {
	io := streams{stdout: raw(a.stdout), stderr: raw(a.stderr)}
	left := make(chan struct{})
	done := make(chan struct{})
	defer close(done)
	if stdin {
		io.stdin = os.Stdin
		if tty && len(keys) > 0 {
			io.stdin = &keyReader{r: os.Stdin, keys: keys, left: left, done: done}
		}
	}
	size, sizes, restore, err := terminal(tty)
	if err != nil {
		return nil, err
	}
	defer restore()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP)
	defer signal.Stop(signals)
	// A signal must reach the command, and so may not end the session with ctx.
	own, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	untilStarted := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	s, err := start(own, io, size)
	if err != nil {
		return nil, err
	}
	untilStarted()
	gone := ctx.Done()
	var late <-chan time.Time
	for got := 0; ; {
		select {
		case <-gone:
			gone, late = nil, time.After(time.Second) // the signal that has ended it, if it was one, is on its way here
		case <-late:
			if got == 0 {
				cancel(context.Cause(ctx))
			}
		case size := <-sizes:
			if s.resize(size.Rows, size.Cols) != nil {
				sizes = nil // it has ended
			}
		case <-s.Done():
			return s.wait()
		case <-left:
			return nil, errors.Join(errLeft, s.Close())
		case sig := <-signals:
			number, ok := sig.(syscall.Signal)
			if got++; got > patience || !ok || s.Signal(int(number)) != nil {
				cancel(context.Canceled)
			}
		}
	}
}

// terminal returns the size of the local terminal, if the command gets a terminal, and its later sizes. It puts it into
// raw mode, which restore undoes.
func terminal(tty bool) (first *wire.TTY, sizes <-chan wire.TTY, restore func(), err error) {
	if !tty {
		return nil, nil, func() {}, nil
	}
	in, out := int(os.Stdin.Fd()), int(os.Stdout.Fd())
	first = &wire.TTY{Term: os.Getenv("TERM")}
	if cols, rows, err := term.GetSize(out); err == nil {
		first.Rows, first.Cols = rows, cols
	}
	if !term.IsTerminal(in) {
		return first, nil, func() {}, nil
	}
	old, err := term.MakeRaw(in)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("setting the terminal up: %w", err)
	}
	coloured := drawn(os.Stdout)
	to, done := make(chan wire.TTY), make(chan struct{})
	changed, stop := resizes()
	go func() {
		defer stop()
		for last := (wire.TTY{}); ; { // a process that is attached to has another size
			if cols, rows, err := term.GetSize(out); err == nil && (wire.TTY{Rows: rows, Cols: cols}) != last {
				last = wire.TTY{Rows: rows, Cols: cols}
				select {
				case to <- last:
				case <-done:
					return
				}
			}
			select {
			case <-changed:
			case <-done:
				return
			}
		}
	}()
	return first, to, func() {
		close(done)
		coloured()
		_ = term.Restore(in, old)
	}, nil
}

const defaultDetachKeys = "ctrl-p,ctrl-q"

func detachKeysFlag(cmd *cobra.Command, keys *string) {
	cmd.Flags().StringVar(keys, "detach-keys", defaultDetachKeys, "keys that leave the command running, of a terminal; \"\" for none")
}

// parseDetachKeys reads keys as docker does: characters and ctrl-X, separated by commas.
func parseDetachKeys(text string) (keys []byte, err error) {
	if text == "" {
		return nil, nil
	}
	for word := range strings.SplitSeq(text, ",") {
		key, ctrl := strings.CutPrefix(word, "ctrl-")
		switch {
		case len(key) != 1 || key[0] <= ' ' || key[0] > '~':
		case !ctrl:
			keys = append(keys, key[0])
			continue
		case key[0] >= '@' && key[0] <= '_' || key[0] >= 'a' && key[0] <= 'z':
			keys = append(keys, key[0]&0x1f)
			continue
		}
		return nil, usageError{fmt.Errorf("--detach-keys %q: use characters and ctrl-X, separated by commas, such as %s", text, defaultDetachKeys)}
	}
	return keys, nil
}

// keyReader reads the user's keys. It closes left at the keys that detach, and then waits for done.
type keyReader struct {
	r          io.Reader
	keys       []byte
	left, done chan struct{}
	held       int  // how many of keys have come, and were not passed on
	gone       bool // all of them have come
}

// Read implements io.Reader.
func (k *keyReader) Read(p []byte) (n int, err error) {
	if len(p) <= len(k.keys) {
		return 0, io.ErrShortBuffer
	}
	for n == 0 && err == nil {
		if k.gone {
			close(k.left)
			<-k.done
			return 0, io.EOF
		}
		buf := make([]byte, len(p)-len(k.keys))
		var got int
		got, err = k.r.Read(buf)
		for _, b := range buf[:got] {
			if b == k.keys[k.held] {
				if k.held++; k.held == len(k.keys) {
					k.gone = true // what came before them is passed on first
					break
				}
				continue
			}
			n += copy(p[n:], k.keys[:k.held])
			k.held = 0
			if b == k.keys[0] {
				k.held = 1
				continue
			}
			p[n] = b
			n++
		}
		if err != nil {
			n += copy(p[n:], k.keys[:k.held])
			k.held = 0
		}
	}
	return n, err
}
