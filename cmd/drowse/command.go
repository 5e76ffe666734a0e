package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"
)

// runE is the function of a cobra command.
type runE = func(*cobra.Command, []string) error

// opened returns a command that first opens something.
func opened[T any](open func() (T, error), do func(*cobra.Command, []string, T) error) runE {
	return func(cmd *cobra.Command, args []string) error {
		v, err := open()
		if err != nil {
			return err
		}
		return do(cmd, args, v)
	}
}

// there returns a command on the place of the VMs.
func (a *app) there(do func(*cobra.Command, []string, place) error) runE {
	return opened(a.place, do)
}

// showCommand returns a command that prints what its argument names as JSON.
func showCommand(a *app, use, short string, read func(ctx context.Context, p place, name string) (any, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(1),
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			v, err := read(cmd.Context(), p, args[0])
			return a.answer(v, err, func(w io.Writer) { _ = printJSON(w, v) })
		}),
	}
}

// completions opens something and returns the words to which a shell can complete.
func completions[T any](open func() (T, error), words func(T) []string) ([]string, cobra.ShellCompDirective) {
	v, err := open()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	// A shell shows them as they are, and a server may have sent them.
	list := slices.DeleteFunc(words(v), func(w string) bool {
		return strings.ContainsFunc(w, func(r rune) bool { return r != '\t' && !unicode.IsPrint(r) })
	})
	return list[:min(len(list), maxListed)], cobra.ShellCompDirectiveNoFileComp
}

// followed returns the error of a command. With follow, an interrupt is a normal end.
func followed(follow bool, err error) error {
	if follow && errors.Is(err, context.Canceled) {
		return nil // by Ctrl-C
	}
	return err
}

// group makes a command that only has subcommands.
func group(cmd *cobra.Command, of ...*cobra.Command) *cobra.Command {
	cmd.Args = unknownVerb // otherwise cobra shows help for an unknown command
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.AddCommand(of...)
	return cmd
}

const no, yes = "no", "yes"

// changed reports whether any of the flags was given.
func changed(cmd *cobra.Command, flags ...string) bool {
	for _, name := range flags {
		if cmd.Flags().Changed(name) {
			return true
		}
	}
	return false
}

// ifSet returns v if set, and nil otherwise.
func ifSet[T any](set bool, v *T) *T {
	if set {
		return v
	}
	return nil
}

// answer prints v with print, or returns err.
func (a *app) answer(v any, err error, text func(w io.Writer)) error {
	if err != nil {
		return err
	}
	return a.print(v, text)
}

// removeAll removes what each word names, and prints what it has removed.
func removeAll[T any](a *app, words []string, remove func(word string) (T, error)) error {
	var names []string
	var errs []error
	removed := []T{}
	for _, w := range words {
		v, err := remove(w)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		names, removed = append(names, w), append(removed, v)
	}
	perr := a.print(map[string][]T{"removed": removed}, func(w io.Writer) {
		for _, name := range names {
			fmt.Fprintln(w, name)
		}
	})
	return errors.Join(append(errs, perr)...)
}

// some returns a list that is [] in JSON if it is empty, and not null.
func some[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// columns returns a writer that aligns tab-separated cells.
func columns(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 8, 2, ' ', 0) }

// table writes a head, and a row of cells for each element of a list.
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

// tableIfAny writes a table unless the list is empty.
func tableIfAny[T any](w io.Writer, head string, list []T, cells func(T) []any) {
	if len(list) > 0 {
		table(w, head, list, cells)
	}
}

// answerList prints a list as JSON or as a table, or returns err.
func answerList[T any](a *app, list []T, err error, head string, cells func(T) []any) error {
	return a.answer(some(list), err, func(w io.Writer) { table(w, head, list, cells) })
}

// line prints one element of a stream: a line of JSON, or its text.
func (a *app) line(v any, text string) error {
	if !a.json() {
		_, err := fmt.Fprintln(a.stdout, text)
		return err
	}
	e := json.NewEncoder(a.stdout)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// dayMinute formats a time for people to the minute, and daySecond to the second.
const dayMinute, daySecond = "2006-01-02 15:04", time.DateTime

// dash replaces an empty cell of a table.
func dash(s string) string { return cmp.Or(s, "-") }

// input opens a file, or stdin for "-".
func input(path string, stdin io.Reader) (io.ReadCloser, error) {
	if path == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(path)
}

// readInput reads a file, or stdin for "-", up to limit+1 bytes. what names the content in errors.
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

// parsed returns all words, parsed.
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

// each does something to all that words name, and prints the results: several as one JSON document with the name done.
// It goes on after an error.
func each[T any](a *app, words []string, done string, do func(word string) (T, error), text func(io.Writer, T)) error {
	results, errs := []T{}, []error{}
	for _, w := range words {
		v, err := do(w)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if results = append(results, v); !a.json() {
			text(a.stdout, v)
		}
	}
	switch {
	case !a.json():
	case len(words) > 1:
		errs = append(errs, printJSON(a.stdout, map[string]any{done: results}))
	case len(results) > 0:
		errs = append(errs, printJSON(a.stdout, results[0]))
	}
	return errors.Join(errs...)
}

// bytesText formats a size for people.
func bytesText(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
