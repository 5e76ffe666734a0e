package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// mainFlags say what to run in a VM once it has booted.
type mainFlags struct {
	execFlags
	entrypoint     string
	own            bool // the flag --entrypoint was given: the image's is not used, nor its command
	detach, remove bool
	bootOnly       bool // nothing to run is no error
	envFile        string
	detachKeys     string
}

// mainID is the name in its guest of the command of "run".
const mainID = "main"

// execError is a failure of drowse in a command whose exit status is otherwise the guest command's.
type execError struct{ error }

func (e execError) Unwrap() error { return e.error }

func (m *mainFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&m.entrypoint, "entrypoint", "", "run this instead of the image's entrypoint, with COMMAND as its arguments; \"\" runs COMMAND alone")
	f.BoolVarP(&m.detach, "detach", "d", false, "do not wait for the command, and print the VM's name; it runs on as the process \""+mainID+"\"")
	f.BoolVar(&m.remove, "rm", false, "remove the VM when the command ends")
	f.StringVar(&m.envFile, "env-file", "", "set variables of the command from a file with lines KEY=VALUE, - for stdin; -e overrides them")
	m.execFlags.add(cmd, " of the command")
	detachKeysFlag(cmd, &m.detachKeys)
}

// take takes the arguments of "run": the image, unless a disk takes its place, and after it the command.
func (m *mainFlags) take(cmd *cobra.Command, args []string, disk bool) (img []string, err error) {
	m.own = cmd.Flags().Changed("entrypoint")
	if len(args) > 0 && !disk {
		img, args = args[:1], args[1:]
	}
	m.cmd.Command = afterDashes(args)
	m.bootOnly = m.detach || disk
	switch {
	case m.detach && m.remove:
		return nil, usageError{errors.New("--rm does not go with --detach, which nobody waits for: give the VM an end by --class ephemeral --ttl TIME, or remove it by `drowse rm -f`")}
	case m.own && m.cmd.noConfig:
		return nil, usageError{errors.New("--entrypoint does not go with --no-image-config: give the whole command")}
	}
	return img, nil
}

// errNoEntrypoint means that an image says nothing to run.
var errNoEntrypoint = errors.New("the image says no entrypoint and no command: say what to run")

// argv returns what to run with the entrypoint and the command of an image. It is empty if there is nothing, and the VM
// need only boot.
func (m *mainFlags) argv(entrypoint, cmd []string) ([]string, error) {
	if m.cmd.noConfig {
		entrypoint, cmd = nil, nil
	}
	if m.own {
		entrypoint, cmd = nil, nil
		if m.entrypoint != "" {
			entrypoint = []string{m.entrypoint}
		}
	}
	args := m.cmd.Command
	if len(entrypoint) == 0 && len(args) > 0 && strings.HasPrefix(args[0], "-") {
		return nil, usageError{fmt.Errorf("%s stands behind the image, and so is the command: flags of drowse stand before the image", args[0])}
	}
	if len(args) == 0 {
		args = cmd
	}
	argv := slices.Concat(entrypoint, args)
	if len(argv) > 0 || m.bootOnly {
		return argv, nil
	}
	return nil, usageError{fmt.Errorf("%w, as in `drowse run -it IMAGE sh`; -d only boots the VM", errNoEntrypoint)}
}

// runMain runs the command in a VM that has booted.
func (a *app) runMain(ctx context.Context, p place, up cameUp, m *mainFlags, argv []string) (err error) {
	left := false // the user has detached from the command
	if m.remove {
		defer func() {
			if left {
				return
			}
			rmCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			defer cancel()
			if _, rerr := p.remove(rmCtx, up.name, true); rerr != nil {
				err = errors.Join(err, execError{rerr})
			}
		}()
	}
	g, err := p.guest(ctx, up.name)
	if err != nil {
		return execError{err}
	}
	defer g.Close()
	c := m.cmd
	c.Command = argv
	if m.detach {
		c.Detach, c.Process = true, mainID
		return a.startMain(ctx, g, c, up, &m.execFlags)
	}
	a.warnUp(up)
	keys, err := parseDetachKeys(m.detachKeys)
	if err != nil {
		return err
	}
	if !a.json() {
		c.Detach, c.Process = true, mainID // it can be left, and attached to
	}
	err = a.execute(ctx, g, c, &m.execFlags, keys, up.with)
	if errors.Is(err, errLeft) {
		left, err = true, nil
	}
	if (!m.remove || left) && !a.json() {
		fmt.Fprintf(a.stderr, "drowse: VM %s goes on\n", up.name)
	}
	var status statusError
	if err != nil && !errors.As(err, &status) {
		err = execError{err}
	}
	return err
}

// startMain starts the command and leaves it.
func (a *app) startMain(ctx context.Context, g inGuest, c command, up cameUp, e *execFlags) error {
	if _, err := startAndLeave(ctx, g, c, e); err != nil {
		return execError{fmt.Errorf("starting the command in VM %s, which goes on: %w", up.name, err)}
	}
	return a.printUp(up)
}

func (a *app) attachCommand() *cobra.Command {
	var keysText string
	cmd := &cobra.Command{
		Use: "attach NAME [PROCESS]", Short: "Attach this terminal to the command of \"run\", or another detached process",
		Long: `Attach stdin and stdout to the process "` + mainID + `", which "drowse run" has started, or to another
detached one. Its newest 256 KiB of output come first. An earlier attachment ends.
The exit status is that of the process. A sleeping VM is woken.

Ctrl-P Ctrl-Q (--detach-keys) leaves it running.`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			keys, err := parseDetachKeys(keysText)
			if err != nil {
				return err
			}
			g, err := p.guest(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer g.Close()
			id := mainID
			if len(args) == 2 {
				id = args[1]
			}
			procs, err := g.processes(cmd.Context())
			if err != nil {
				return err
			}
			tty, there := false, false
			var others []string
			for _, p := range procs {
				if p.Process == id {
					there, tty = true, p.TTY
				}
				others = append(others, p.Process)
			}
			if !there {
				is := "it has none"
				if len(others) > 0 {
					is = "it has " + strings.Join(others, ", ")
				}
				return fmt.Errorf("VM %s has no process %s: %s; `drowse run -d` and `drowse exec -d` start them", args[0], id, is)
			}
			st, err := a.atTerminal(cmd.Context(), tty, true, keys, func(ctx context.Context, io streams, _ *wire.TTY) (session, error) {
				return g.attach(ctx, id, io)
			})
			if errors.Is(err, errLeft) {
				return nil
			}
			return execResult(st, err)
		}),
	}
	detachKeysFlag(cmd, &keysText)
	return cmd
}
