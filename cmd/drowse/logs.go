package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// logPoll is how often a followed log is looked at.
const logPoll = 200 * time.Millisecond

func (a *app) logsCommand() *cobra.Command {
	var process, asIs, follow bool
	tail := "all"
	cmd := &cobra.Command{
		Use: "logs NAME", Short: "Print the console output of a VM",
		Long: logsRaw(`Print the console of a VM: its kernel, its init, and what programs write to /dev/console. The output
of the command of "drowse run -d" is in "drowse attach", and that of a service in "drowse service
logs". No VM is woken. With --follow the command ends when the VM stops; it waits while it sleeps.`),
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			lines := -1
			if tail != "all" {
				if _, err := fmt.Sscanf(tail, "%d", &lines); err != nil || lines < 0 || fmt.Sprint(lines) != tail {
					return usageError{fmt.Errorf("--tail %q: use a number of lines, or all", tail)}
				}
			}
			if follow && a.json() {
				return usageError{errors.New("--follow has no end, and so no JSON document: leave out -o json")}
			}
			if _, err := s.State.Get(args[0]); err != nil {
				return err
			}
			path := s.State.ConsoleLog(args[0])
			if process {
				path = s.State.ProcessLog(args[0])
			}
			text, at, err := readLog(path)
			if err != nil {
				return err
			}
			text = lastLines(text, lines)
			if err := a.print(map[string]string{"name": args[0], "log": string(text)}, func(io.Writer) { _, _ = a.logTo(asIs).Write(text) }); err != nil || !follow {
				return err
			}
			return followed(true, followLog(cmd.Context(), path, at, a.logTo(asIs), func() bool {
				r, err := s.State.Get(args[0])
				return err != nil || r.Phase == state.Stopped || r.Phase == state.Crashed
			}))
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&process, "vmm", false, "print the log of the VM's process instead")
	f.BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	f.StringVarP(&tail, "tail", "n", tail, "only this many lines at the end")
	rawFlag(cmd, &asIs)
	return cmd
}

// readLog reads a log with the part that was put away before it, and returns how many bytes of the file itself it read.
func readLog(path string) (text []byte, at int64, err error) {
	for _, p := range []string{path + ".1", path} {
		data, err := os.ReadFile(p)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, 0, fmt.Errorf("reading the log: %w", err)
		}
		text, at = append(text, data...), int64(len(data))
	}
	return text, at, nil
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

// followLog writes what is added to a log after a number of bytes, until it ends and nothing more comes.
func followLog(ctx context.Context, path string, at int64, w io.Writer, ended func() bool) error {
	var is os.FileInfo
	for {
		last := ended() // before the read: what it wrote before its end is read
		f, err := os.Open(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("reading the log: %w", err)
		}
		if err == nil {
			now, err := f.Stat()
			if err == nil {
				if is != nil && !os.SameFile(is, now) || now.Size() < at {
					at = 0 // it was put away, and this is a new one
				}
				is = now
				var n int64
				n, err = io.Copy(w, io.NewSectionReader(f, at, now.Size()-at))
				at += n
			}
			f.Close()
			if err != nil {
				return fmt.Errorf("reading the log: %w", err)
			}
		}
		if last {
			return nil
		}
		select {
		case <-time.After(logPoll):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
