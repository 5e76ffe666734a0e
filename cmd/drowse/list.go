package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// listed returns the sandboxes of one page or of all pages.
func (a *app) listed(ctx context.Context, f records.Filter, all bool) (list records.List, err error) {
	p, err := a.place()
	if err != nil {
		return list, err
	}
	if all {
		return allOf(ctx, p, f)
	}
	return p.List(ctx, f)
}

// maxListed bounds how many sandboxes a list may have: a server could go on for ever.
const maxListed = 100_000

// allOf returns the sandboxes of all pages.
func allOf(ctx context.Context, p place, f records.Filter) (list records.List, err error) {
	f.Limit = records.MaxPage
	list, err = p.List(ctx, f)
	for err == nil && list.Next != "" {
		if list.Next <= f.After || len(list.Sandboxes) > maxListed {
			return list, fmt.Errorf("the list of VMs does not end: after %d there is %.64q again", len(list.Sandboxes), list.Next)
		}
		f.After = list.Next
		var page records.List
		if page, err = p.List(ctx, f); err == nil {
			list.Sandboxes = append(list.Sandboxes, page.Sandboxes...)
			list.Problems = append(list.Problems, page.Problems...)
			list.Next = page.Next
		}
	}
	return list, err
}

// listDoc is `drowse ls -o json`.
type listDoc struct {
	Version int `json:"version"`
	records.List
}

func (a *app) lsCommand() *cobra.Command {
	var (
		f        records.Filter
		statuses []string
		all      bool
	)
	cmd := &cobra.Command{
		Use: "ls", Short: "List sandboxes by owner, tag, class and status", Args: cobra.NoArgs,
		Long: `List sandboxes, by owner, class, tags (all of those given) and status (one of those given):
creating, running, waiting, asleep, stopped, crashed, expired.

The JSON document is one page; pass its "next" to --after for the next page.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, s := range statuses {
				f.Statuses = append(f.Statuses, records.Status(s))
			}
			if cmd.Flags().Changed("limit") && f.Limit < 1 {
				return usageError{fmt.Errorf("--limit %d: use 1 to %d", f.Limit, records.MaxPage)}
			}
			if err := f.Check(); err != nil {
				return usageError{err}
			}
			list, err := a.listed(cmd.Context(), f, all)
			if err != nil {
				return err
			}
			for _, p := range list.Problems {
				a.log.Warn("the list may lack something", "cause", printable(p))
			}
			at := func(t time.Time) string {
				if t.IsZero() {
					return "-"
				}
				return t.Local().Format(dayMinute)
			}
			return a.print(listDoc{1, list}, func(w io.Writer) {
				head := "NAME\tSTATUS\tCLASS\tOWNER\tTAGS\tIMAGE\tMEMORY\tEXPIRES\tWAKES\tNOTE"
				hosts := slices.ContainsFunc(list.Sandboxes, func(s records.Sandbox) bool { return s.Host != "" })
				if hosts {
					head = strings.Replace(head, "STATUS\t", "STATUS\tHOST\t", 1)
				}
				table(w, head, list.Sandboxes, func(s records.Sandbox) []any {
					row := []any{
						s.Name, s.Status, s.Class, dash(s.Owner), dash(strings.Join(s.Tags, ",")), s.Image, fmt.Sprintf("%d MiB", s.Memory),
						at(s.Expires), at(s.NextWake), said(cmp.Or(s.Problem, s.Purpose)),
					}
					if hosts {
						row = slices.Insert(row, 2, any(dash(s.Host)))
					}
					return row
				})
				if list.Next != "" {
					fmt.Fprintf(a.stderr, "drowse: there are more: --after %s, or --all\n", list.Next)
				}
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&f.Owner, "owner", "", "only sandboxes of this owner")
	fl.StringArrayVar(&f.Tags, "tag", nil, "only sandboxes with this tag; repeatable")
	fl.StringArrayVar(&statuses, "status", nil, "only sandboxes with this status; repeatable")
	fl.StringVar((*string)(&f.Class), "class", "", "only sandboxes of this class")
	fl.IntVar(&f.Limit, "limit", 0, fmt.Sprintf("size of a page, up to %d (default %d)", records.MaxPage, records.DefaultPage))
	fl.StringVar(&f.After, "after", "", "only sandboxes with names after this one")
	fl.BoolVar(&all, "all", false, "all pages")
	cmd.MarkFlagsMutuallyExclusive("all", "limit")
	cmd.MarkFlagsMutuallyExclusive("all", "after")
	return cmd
}

// vmRow is a sandbox in `drowse ps -o json`.
type vmRow struct {
	Name   string         `json:"name"`
	Status records.Status `json:"status"`
	Image  string         `json:"image"`
	VCPUs  int            `json:"vcpus"`
	Memory int            `json:"memory_mib"`
	PID    int            `json:"pid,omitempty"` // not from a server
	// Confined says of one with a process whether its guest is in a confined one.
	Confined bool      `json:"confined,omitempty"`
	Created  time.Time `json:"created"`
	Note     string    `json:"note,omitempty"`
	// Parent is the VM that it was forked from. Generation counts the forks back to a VM that is not a fork.
	Parent     string `json:"parent,omitempty"`
	Generation int    `json:"generation,omitempty"`
}

func (a *app) psCommand() *cobra.Command {
	var all, quiet, untrimmed bool
	var filters []string
	cmd := &cobra.Command{
		Use: "ps", Short: "List VMs with their processes and memory", Args: cobra.NoArgs,
		Long: `List VMs that run or sleep; with --all also stopped ones. --filter is name=TEXT (a part of the
name), status=STATUS, ancestor=IMAGE or label=TAG. Several filters of a key are alternatives, and
all keys must match. "drowse ls" lists by owner and class, in pages.`,
		RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
			match, err := psFilter(filters)
			if err != nil {
				return err
			}
			list, err := allOf(cmd.Context(), p, records.Filter{})
			if err != nil {
				return err
			}
			var errs []error
			for _, p := range list.Problems {
				errs = append(errs, errors.New(p))
			}
			var rows []vmRow
			for _, b := range list.Sandboxes {
				if !all && b.Status == records.Stopped && len(filters) == 0 || !match(b) {
					continue
				}
				row := vmRow{
					Name: b.Name, Status: b.Status, Image: b.Image, VCPUs: b.VCPUs, Memory: b.Memory, Created: b.Created,
					Confined: b.Confined, Parent: b.Parent, Generation: b.Generation,
				}
				if !quiet {
					if row.PID, row.Note, err = p.note(cmd.Context(), b); errors.Is(err, spec.ErrNotFound) {
						continue // it was removed meanwhile
					} else if err != nil {
						errs = append(errs, err)
						continue
					}
					if b.Owner == spec.TemplateOwner {
						row.Note = cmp.Or(row.Note, b.Purpose)
					}
				}
				rows = append(rows, row)
			}
			if quiet && !a.json() {
				for _, r := range rows {
					fmt.Fprintln(a.stdout, r.Name)
				}
				return errors.Join(errs...)
			}
			err = answerList(a, rows, nil, "NAME\tSTATUS\tIMAGE\tVCPUS\tMEMORY\tCREATED\tNOTE", func(r vmRow) []any {
				return []any{r.Name, r.Status, imageText(r.Image), r.VCPUs, fmt.Sprintf("%d MiB", r.Memory), r.Created.Local().Format(dayMinute), said(r.Note)}
			})
			return errors.Join(append(errs, err)...)
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&all, "all", "a", false, "include stopped VMs")
	f.BoolVarP(&quiet, "quiet", "q", false, "only names, one a line")
	f.StringArrayVarP(&filters, "filter", "f", nil, "KEY=VALUE, see above; repeatable")
	f.BoolVar(&untrimmed, "no-trunc", false, "")
	_ = f.MarkHidden("no-trunc") // docker's: nothing is cut anyway
	return cmd
}

// psFilter returns what the filters of "ps" let through.
func psFilter(filters []string) (func(records.Sandbox) bool, error) {
	by := map[string][]string{}
	for _, f := range filters {
		key, value, ok := strings.Cut(f, "=")
		if !ok || !slices.Contains([]string{"name", "status", "ancestor", "label"}, key) {
			return nil, usageError{fmt.Errorf("--filter %q: use name=TEXT, status=STATUS, ancestor=IMAGE or label=TAG", f)}
		}
		if key == "status" && !slices.Contains(records.Statuses, records.Status(value)) {
			hint := map[string]string{"exited": ", of which stopped is docker's exited", "paused": ", of which asleep is like docker's paused"}[value]
			var words []string
			for _, s := range records.Statuses {
				if s != records.Failed { // of old
					words = append(words, string(s))
				}
			}
			return nil, usageError{fmt.Errorf("--filter %q: use one of %s%s", f, strings.Join(words, ", "), hint)}
		}
		by[key] = append(by[key], value)
	}
	any := func(key string, is func(value string) bool) bool {
		return len(by[key]) == 0 || slices.ContainsFunc(by[key], is)
	}
	return func(b records.Sandbox) bool {
		return any("name", func(v string) bool { return strings.Contains(b.Name, v) }) &&
			any("status", func(v string) bool { return string(b.Status) == v }) &&
			any("ancestor", func(v string) bool { return b.Image == v || strings.TrimSuffix(b.Image, ":latest") == v }) &&
			any("label", func(v string) bool { return slices.Contains(b.Tags, v) })
	}, nil
}
