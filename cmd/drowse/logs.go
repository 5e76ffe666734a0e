package main

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// logOptions say what to print of a log.
type logOptions struct {
	lines   int // only so many at the end; negative is all
	process bool
	follow  bool
}

func (a *app) logsCommand() *cobra.Command {
	var process, asIs, follow bool
	tail := "all"
	cmd := &cobra.Command{
		Use: "logs NAME", Short: "Print the console output of a VM",
		Long: logsRaw(`Print the console of a VM: its kernel, its init, and what programs write to /dev/console. The output
of the command of "drowse run -d" is in "drowse attach", and that of a service in "drowse service
logs". No VM is woken. With --follow the command ends when the VM stops; it waits while it sleeps.`),
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			o := logOptions{lines: -1, process: process, follow: follow}
			if tail != "all" {
				if _, err := fmt.Sscanf(tail, "%d", &o.lines); err != nil || o.lines < 0 || fmt.Sprint(o.lines) != tail {
					return usageError{fmt.Errorf("--tail %q: use a number of lines, or all", tail)}
				}
			}
			if follow && a.json() {
				return usageError{errors.New("--follow has no end, and so no JSON document: leave out -o json")}
			}
			if !a.json() {
				return followed(follow, p.log(cmd.Context(), args[0], o, a.logTo(asIs)))
			}
			var text bytes.Buffer
			if err := p.log(cmd.Context(), args[0], o, &text); err != nil {
				return err
			}
			return printJSON(a.stdout, map[string]string{"name": args[0], "log": text.String()})
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&process, "vmm", false, "print the log of the VM's process instead")
	f.BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	f.StringVarP(&tail, "tail", "n", tail, "only this many lines at the end")
	rawFlag(cmd, &asIs)
	return cmd
}

// lastLines returns the last n lines, or all if n is negative.
func lastLines(text []byte, n int) []byte {
	if n < 0 {
		return text
	}
	end := len(text)
	if end > 0 && text[end-1] == '\n' {
		end--
	}
	for ; n > 0; n-- {
		i := bytes.LastIndexByte(text[:end], '\n')
		if i < 0 {
			return text
		}
		if end = i; n == 1 {
			return text[i+1:]
		}
	}
	return nil
}
