package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
)

// runE is what cobra runs for a command.
type runE = func(*cobra.Command, []string) error

// opened is a command that opens something before all else it does.
func opened[T any](open func() (T, error), do func(*cobra.Command, []string, T) error) runE {
	return func(cmd *cobra.Command, args []string) error {
		v, err := open()
		if err != nil {
			return err
		}
		return do(cmd, args, v)
	}
}

// onHost is a command on the host of the state directory, onImages on its images, and onFleet on its sandboxes as rows.
func (a *app) onHost(do func(*cobra.Command, []string, *sandbox.Host) error) runE {
	return opened(a.store, do)
}

// onAwake is a command on the VM that its first argument names, and wakes that if it sleeps.
func (a *app) onAwake(do func(*cobra.Command, []string, *sandbox.Sandbox) error) runE {
	return a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
		if err := a.wakeFor(cmd.Context(), s, args[0]); err != nil {
			return err
		}
		return do(cmd, args, s.Sandbox(args[0]))
	})
}

func (a *app) onImages(do func(*cobra.Command, []string, *image.Store) error) runE {
	return opened(a.images, do)
}

func (a *app) onFleet(do func(*cobra.Command, []string, *fleet.Fleet) error) runE {
	return opened(a.fleet, do)
}

// completions are what a shell completes a word to, of what is opened.
func completions[T any](open func() (T, error), words func(T) []string) ([]string, cobra.ShellCompDirective) {
	v, err := open()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return words(v), cobra.ShellCompDirectiveNoFileComp
}

// launching is the host with what starts VMs, and traced.
func (a *app) launching(ctx context.Context) (*sandbox.Host, error) {
	h, err := a.store()
	if err != nil {
		return nil, err
	}
	l, err := a.launcher()
	if err != nil {
		return nil, err
	}
	return a.traced(ctx, h.With(l))
}

// followed is how a command ended that goes on until it is interrupted, if follow says that it does.
func followed(follow bool, err error) error {
	if follow && errors.Is(err, context.Canceled) {
		return nil // by Ctrl-C
	}
	return err
}

// group is a command that only has others.
func group(cmd *cobra.Command, of ...*cobra.Command) *cobra.Command {
	cmd.Args = cobra.NoArgs // or what is no command would be taken for help
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.AddCommand(of...)
	return cmd
}

// changed says whether any of the flags was given.
func changed(cmd *cobra.Command, flags ...string) bool {
	for _, name := range flags {
		if cmd.Flags().Changed(name) {
			return true
		}
	}
	return false
}

// ifSet is v if a flag was given, and nil otherwise.
func ifSet[T any](set bool, v *T) *T {
	if set {
		return v
	}
	return nil
}

// answer prints v as print does, unless err says that there is none.
func (a *app) answer(v any, err error, text func(w io.Writer)) error {
	if err != nil {
		return err
	}
	return a.print(v, text)
}

// some is a list that is [] in JSON if it is empty, and not null.
func some[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// columns align what is written to them, with tabs between cells.
func columns(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 8, 2, ' ', 0) }

// table writes a head, and cells for each of a list.
func table[T any](w io.Writer, head string, list []T, cells func(T) []any) {
	t := columns(w)
	defer t.Flush()
	fmt.Fprintln(t, head)
	for _, v := range list {
		for i, c := range cells(v) {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, c)
		}
		fmt.Fprintln(t)
	}
}

// tableIfAny is a table unless the list is empty.
func tableIfAny[T any](w io.Writer, head string, list []T, cells func(T) []any) {
	if len(list) > 0 {
		table(w, head, list, cells)
	}
}

// answerList prints a list, as a table that has a head and cells for each, unless err says that there is none.
func answerList[T any](a *app, list []T, err error, head string, cells func(T) []any) error {
	return a.answer(some(list), err, func(w io.Writer) { table(w, head, list, cells) })
}

// line prints one of many things that come: as a line of JSON, or its text.
func (a *app) line(v any, text string) error {
	if !a.json() {
		_, err := fmt.Fprintln(a.stdout, text)
		return err
	}
	e := json.NewEncoder(a.stdout)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// dayMinute is a time for people, to the minute, and daySecond to the second.
const dayMinute, daySecond = "2006-01-02 15:04", time.DateTime

// dash stands for what is empty in a table.
func dash(s string) string { return cmp.Or(s, "-") }

// input is a file, or stdin for "-".
func input(path string, stdin io.Reader) (io.ReadCloser, error) {
	if path == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(path)
}

// readInput reads a file, or stdin for "-", up to a byte more than limit. what says what it has.
func readInput(what, path string, stdin io.Reader, limit int64) ([]byte, error) {
	in, err := input(path, stdin)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", what, err)
	}
	defer in.Close()
	text, err := io.ReadAll(io.LimitReader(in, limit+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", what, err)
	}
	return text, nil
}

// parsed are all words as parse reads them.
func parsed[T any](words []string, parse func(string) (T, error)) (all []T, err error) {
	for _, w := range words {
		v, err := parse(w)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}
