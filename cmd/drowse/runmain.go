package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
)

// mainFlags say what to run in a VM once it has booted.
type mainFlags struct {
	execFlags
	entrypoint, detach, remove bool
}

// mainID is the name of a detached command of "run" in its guest.
const mainID = "main"

// execError is a failure of drowse in a command whose exit status is otherwise the guest command's.
type execError struct{ error }

func (e execError) Unwrap() error { return e.error }

func (m *mainFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&m.entrypoint, "entrypoint", false, "run the image's entrypoint with COMMAND, or the image's own command, as its arguments")
	f.BoolVarP(&m.detach, "detach", "d", false, "do not wait for the command; it runs on as the process \""+mainID+"\"")
	f.BoolVar(&m.remove, "rm", false, "remove the VM when the command ends")
	m.execFlags.add(cmd, " of the command")
}

// wanted reports whether to run a command.
func (m *mainFlags) wanted() bool { return m.entrypoint || len(m.cmd.Argv) > 0 }

// take splits the arguments of "run": the command follows --.
func (m *mainFlags) take(cmd *cobra.Command, args []string) ([]string, error) {
	if dash := cmd.ArgsLenAtDash(); dash >= 0 {
		args, m.cmd.Argv = args[:dash], args[dash:]
		if len(m.cmd.Argv) == 0 && !m.entrypoint {
			return nil, usageError{errors.New("no command stands behind --")}
		}
	}
	if len(args) > 1 {
		return nil, usageError{fmt.Errorf("%d images are named: write -- before a command, as in `drowse run %s -- %s`", len(args), args[0], args[1])}
	}
	if !m.wanted() {
		for _, name := range []string{"detach", "rm", "interactive", "tty", "env", "workdir", "user", "no-image-config"} {
			if cmd.Flags().Changed(name) {
				return nil, usageError{fmt.Errorf("--%s goes with a command: write it behind --, or use --entrypoint", name)}
			}
		}
	}
	switch {
	case m.detach && (m.interA || m.tty || m.remove):
		return nil, usageError{errors.New("--detach does not go with --interactive, --tty and --rm")}
	case m.entrypoint && m.noConfig:
		return nil, usageError{errors.New("--entrypoint does not go with --no-image-config")}
	}
	return args, nil
}

// check finds out before the boot whether an image has nothing to run.
func (m *mainFlags) check(s *sandbox.Host, ref string) error {
	if !m.entrypoint || ref == "" {
		return nil
	}
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		return err
	}
	img, err := images.Find(ref)
	if err != nil {
		return err
	}
	_, err = img.RunConfig.Argv(m.cmd.Argv)
	return err
}

// runMain runs the command in a VM that has booted.
func (a *app) runMain(ctx context.Context, s *sandbox.Host, rep control.Report, m *mainFlags) (err error) {
	if m.remove {
		defer func() {
			rmCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			defer cancel()
			if rerr := s.Sandbox(rep.Name).Delete(rmCtx, sandbox.DeleteOptions{Force: true}); rerr != nil {
				err = errors.Join(err, execError{rerr})
			}
		}()
	}
	client, err := s.Sandbox(rep.Name).Agent(ctx)
	if err != nil {
		return execError{err}
	}
	defer client.Close()
	c := m.cmd
	if m.entrypoint {
		c, err = s.Sandbox(rep.Name).Entrypoint(c)
	} else {
		c, err = m.complete(s.Sandbox(rep.Name), c)
	}
	if err != nil {
		return execError{err}
	}
	if m.detach {
		return a.startMain(ctx, client, c, rep)
	}
	a.warnHooks(rep.Name, rep.Hooks)
	a.warnNetwork(rep.Name, rep.Network)
	err = a.execute(ctx, client, c, &m.execFlags, func(doc execDoc) any {
		return struct {
			control.Report
			Command execDoc `json:"command"`
		}{rep, doc}
	})
	if !m.remove && !a.json() {
		fmt.Fprintf(a.stderr, "drowse: VM %s goes on\n", rep.Name)
	}
	var status statusError
	if err != nil && !errors.As(err, &status) {
		err = execError{err}
	}
	return err
}

// startMain starts the command and detaches it.
func (a *app) startMain(ctx context.Context, client *guest.Client, c guest.Cmd, rep control.Report) error {
	c.Detach, c.ID = true, mainID
	p, err := client.Start(ctx, c)
	if err != nil {
		return execError{err}
	}
	if p.PID() == 0 { // the command did not start
		st, err := p.Wait()
		if st != nil && st.NotStarted != "" {
			return execError{fmt.Errorf("starting the command in VM %s, which goes on: %s", rep.Name, st.NotStarted)}
		}
		return execError{err}
	}
	if err := p.Close(); err != nil {
		return execError{err}
	}
	return a.printReport(rep)
}
