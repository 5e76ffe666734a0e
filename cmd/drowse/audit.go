package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest/audit"
)

// auditOptions say what to read of a trail.
type auditOptions struct {
	since  time.Time // zero is all
	follow bool
}

func (a *app) auditCommand() *cobra.Command {
	var (
		follow bool
		since  string
		paths  bool
	)
	cmd := &cobra.Command{
		Use: "audit NAME", Short: "Show the audit trail of a VM: who ran what, and how it ended", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Show what drowse, and programs that use its library, did in a VM through its agent: commands,
sessions, copies, forwarded connections. A sleeping VM is not woken.

The result is an exit code or signal, "running", "detached" for a process that was left
running, or "unknown" if the program that asked was killed before the end. The trail has no
values of environment variables, and neither input nor output. docs/guides/audit.md says what
it proves.

--follow prints each entry as it begins and again as it ends, until the VM is removed. With
-o json each entry is one line.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			o := auditOptions{follow: follow}
			var err error
			if o.since, err = sinceTime(since, time.Now()); err != nil {
				return usageError{err}
			}
			if follow {
				return a.followAudit(cmd.Context(), p.vm(args[0]), o, paths)
			}
			entries := []audit.Entry{}
			is, err := p.vm(args[0]).audit(cmd.Context(), o, func(e audit.Entry) error {
				entries = append(entries, e)
				return nil
			})
			if err != nil {
				return err
			}
			doc := struct {
				audit.Trailer
				Entries []audit.Entry `json:"entries"`
			}{is, entries}
			return a.print(doc, func(w io.Writer) {
				if is.First > 1 {
					fmt.Fprintln(w, "what is older was dropped: a trail has", 1+audit.KeptFiles, "files of", bytesText(audit.MaxFile))
				}
				switch {
				case is.Parent != "":
					fmt.Fprintf(w, "%s is a fork of %s, whose own trail has what was done before\n", is.Name, is.Parent)
				case is.Snapshot != "":
					fmt.Fprintf(w, "%s was made from snapshot %s; what was done before is in the trail of the VM that that is of\n", is.Name, is.Snapshot)
				}
				var rows bytes.Buffer
				t := columns(&rows)
				fmt.Fprintln(t, auditColumns)
				for _, e := range entries {
					fmt.Fprintln(t, auditRow(e))
				}
				t.Flush()
				lines := strings.SplitAfter(rows.String(), "\n")
				fmt.Fprint(w, lines[0])
				for i, e := range entries {
					fmt.Fprint(w, lines[i+1])
					if paths {
						fmt.Fprint(w, auditChanges(e))
					}
				}
			})
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new entries as they come")
	cmd.Flags().BoolVar(&paths, "changes", false, "list the changed paths of commands that ran with \"drowse exec --changes\"")
	cmd.Flags().StringVar(&since, "since", "", "omit entries that ended before this time (RFC 3339) or this long ago (10m, 24h)")
	return cmd
}

func (a *app) followAudit(ctx context.Context, b handle, o auditOptions, paths bool) error {
	_, err := b.audit(ctx, o, func(e audit.Entry) error {
		text := auditRow(e) + "\n"
		if paths {
			text += auditChanges(e)
		}
		return a.line(e, strings.TrimSuffix(text, "\n"))
	})
	return followed(true, err)
}

// sinceTime parses --since.
func sinceTime(s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return t, fmt.Errorf("--since %q: use a time such as 2026-01-02T15:04:05Z, or how long ago, such as 10m", s)
	}
	return t, nil
}

const auditColumns = "BEGIN\tTOOK\tRESULT\tIN\tOUT\tBY\tUSER\tWHAT"

// auditRow returns an entry as one line.
func auditRow(e audit.Entry) string {
	if e.Status == audit.Damaged {
		return "-\t-\tdamaged\t-\t-\t-\t-\ta line of the trail cannot be read"
	}
	begin, took, in, out, by := "-", "-", "-", "-", "-"
	if !e.Begin.IsZero() {
		begin = e.Begin.Local().Format("2006-01-02 15:04:05.000")
	}
	if e.Status == audit.Ended {
		took = (time.Duration(e.Elapsed*1000) * time.Microsecond).Round(time.Millisecond).String()
	}
	if o := e.Outcome; o != nil {
		in, out = bytesText(o.BytesIn), bytesText(o.BytesOut)
	}
	if p := e.By; p != nil {
		by = fmt.Sprintf("%s[%d] uid %d", auditWord(p.Comm), p.PID, p.UID)
		if p.LoginUID != nil && int64(*p.LoginUID) != int64(p.UID) {
			by += fmt.Sprintf(" (login %d)", *p.LoginUID)
		}
	}
	user := "-"
	if e.User != "" {
		user = auditWord(e.User)
	}
	return strings.Join([]string{begin, took, auditResult(e), in, out, by, user, auditWhat(e)}, "\t")
}

// auditResult returns how an action ended.
func auditResult(e audit.Entry) string {
	o := e.Outcome
	switch {
	case e.Status != audit.Ended || o == nil:
		return string(e.Status)
	case o.TimedOut:
		return "timed out"
	case o.ExitSignal != 0:
		return "signal " + strconv.Itoa(o.ExitSignal)
	case o.Exit != nil:
		return "exit " + strconv.Itoa(*o.Exit)
	case e.Detach && o.Started != "":
		return "detached"
	case o.Error != "":
		return "failed"
	}
	return "ok"
}

// auditWhat describes an action.
func auditWhat(e audit.Entry) string {
	words := []string{string(e.Kind)}
	if e.Kind == "" {
		words[0] = "something whose beginning was dropped"
	}
	if e.Via != "" {
		words = append(words, "by "+auditWord(e.Via))
	}
	if e.Pty {
		words = append(words, "(terminal)")
	}
	add := func(parts ...string) {
		for _, p := range parts {
			words = append(words, auditWord(p))
		}
	}
	add(e.Argv...)
	if e.ArgvSHA256 != "" {
		words = append(words, "... (cut)")
	}
	if e.Process != "" {
		add(e.Process)
	}
	if e.Number != 0 {
		words = append(words, "signal "+strconv.Itoa(e.Number))
	}
	switch e.Kind {
	case audit.KindCopyIn:
		add(e.HostPath, e.Path)
	case audit.KindCopyOut:
		add(e.Path, e.HostPath)
	case audit.KindRename, audit.KindSymlink:
		add(e.Path, e.To)
	case audit.KindForward, audit.KindListen:
		add(e.Network, e.Address)
		if o := e.Outcome; o != nil {
			words = append(words, fmt.Sprintf("(%d connections)", o.Connections))
		}
	default:
		if e.Path != "" {
			add(e.Path)
		}
	}
	if o := e.Outcome; o != nil && o.Started != "" {
		words = append(words, "as "+auditWord(o.Started))
	}
	if o := e.Outcome; o != nil && o.Changes != nil {
		c := o.Changes
		words = append(words, fmt.Sprintf("(%d added, %d changed, %d removed%s)", len(c.Added), len(c.Changed), len(c.Removed), moreChanges(c)))
	}
	if o := e.Outcome; o != nil && o.Error != "" {
		words = append(words, ": "+printable(strings.ReplaceAll(o.Error, "\n", " ")))
	}
	return strings.Join(words, " ")
}

// moreChanges describes the changes that the list leaves out.
func moreChanges(c *audit.Changes) (s string) {
	if c.More > 0 {
		s = fmt.Sprintf(", %d more", c.More)
	}
	if c.Partial != "" {
		s += ", not all is known"
	}
	return s
}

// auditChanges returns the changes of a command, one line for each path.
func auditChanges(e audit.Entry) string {
	if e.Outcome == nil || e.Outcome.Changes == nil {
		return ""
	}
	var b strings.Builder
	c := e.Outcome.Changes
	for _, l := range []struct {
		mark  string
		paths []string
	}{{"+", c.Added}, {"~", c.Changed}, {"-", c.Removed}} {
		for _, p := range l.paths {
			fmt.Fprintf(&b, "    %s %s\n", l.mark, terminalPath(p))
		}
	}
	if c.More > 0 {
		fmt.Fprintf(&b, "    ... and %d more\n", c.More)
	}
	if c.Partial != "" {
		fmt.Fprintf(&b, "    not all is known: %s\n", printable(c.Partial))
	}
	return b.String()
}

// terminalPath returns a path that is safe for a terminal. It quotes a path with unprintable characters. A leading
// quotation mark shows that the path is quoted.
func terminalPath(p string) string {
	if strings.IndexFunc(p, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0 || !utf8.ValidString(p) {
		return strconv.Quote(p)
	}
	return p
}

// auditWord quotes a word for a shell, or as Go does if it has unprintable characters.
func auditWord(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0 {
		return strconv.Quote(s)
	}
	return shellQuote(s)
}

// shellQuote quotes a word for a POSIX shell if necessary.
func shellQuote(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-+=:@,", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
