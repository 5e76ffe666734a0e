package fakeguest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Command is a program of a guest; it returns the exit code. When ctx ends it is killed, and must return soon.
type Command func(ctx context.Context, p *Process) int

// Process is a running command.
type Process struct {
	Args           []string // the name first
	Env            []string
	Dir, User      string // as requested; empty is / and root
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Guest          *Guest
	// TTY is the size of its terminal; nil without one. Resized gets later sizes, the last of them.
	TTY     *agentpb.WindowSize
	Resized <-chan *agentpb.WindowSize
}

// fail reports an error on standard error.
func (p *Process) fail(err error) int {
	_, _ = fmt.Fprintf(p.Stderr, "%s: %v\n", p.Args[0], err)
	return 1
}

// Builtin are the commands that each guest has.
var Builtin = map[string]Command{
	"true":  func(context.Context, *Process) int { return 0 },
	"false": func(context.Context, *Process) int { return 1 },
	"echo": func(_ context.Context, p *Process) int {
		if _, err := fmt.Fprintln(p.Stdout, strings.Join(p.Args[1:], " ")); err != nil {
			return 1
		}
		return 0
	},
	"cat": func(_ context.Context, p *Process) int {
		if len(p.Args) == 1 {
			if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
				return p.fail(err)
			}
		}
		for _, name := range p.Args[1:] {
			if !path.IsAbs(name) {
				name = path.Join("/", p.Dir, name)
			}
			data, err := p.Guest.ReadFile(name)
			if err == nil {
				_, err = p.Stdout.Write(data)
			}
			if err != nil {
				return p.fail(err)
			}
		}
		return 0
	},
	"sleep": func(ctx context.Context, p *Process) int {
		seconds, err := strconv.ParseFloat(p.Args[len(p.Args)-1], 64)
		if err != nil || len(p.Args) != 2 {
			return p.fail(errors.New("how many seconds?"))
		}
		select {
		case <-time.After(time.Duration(seconds * float64(time.Second))):
			return 0
		case <-ctx.Done():
			return 1
		}
	},
}
