package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench/page"
)

func (a *app) benchReport() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use: "report [FILE.json ...]", Short: "Make one HTML page of what benchmarks have printed with -o json",
		Long: `Make one HTML page of what benchmarks have printed with -o json.

Reads files, or stdin if there are none or for "-". The page goes to stdout, or to the
file that --out names. It needs no network and has no scripts: distributions, stages,
latency by size of RAM and by depth of the chain, other monitors side by side, the
machines and commits, and all rows as a table.`,
		RunE: func(_ *cobra.Command, args []string) error {
			if a.json() {
				return usageError{errors.New("bench report writes HTML: its input is the JSON")}
			}
			if len(args) == 0 {
				args = []string{"-"}
			}
			var p page.Page
			for _, name := range args {
				if err := addReport(&p, name); err != nil {
					return fmt.Errorf("reading a report: %w", err)
				}
			}
			var html bytes.Buffer
			if err := p.HTML(&html); err != nil {
				return err
			}
			if out == "" {
				_, err := a.stdout.Write(html.Bytes())
				return err
			}
			return replaceFile(out, html.Bytes())
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "file to write the page to, instead of stdout")
	return cmd
}

func addReport(p *page.Page, name string) error {
	if name == "-" {
		return p.Add("stdin", os.Stdin)
	}
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return p.Add(filepath.Base(name), f)
}

// replaceFile writes a file whole or not at all.
func replaceFile(path string, content []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".drowse-*")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("writing %s: %w", path, err), os.Remove(f.Name()))
		}
	}()
	_, err = io.Copy(f, bytes.NewReader(content))
	if err := errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil // the file is there
	}
	defer d.Close()
	_ = d.Sync() // not every file system can
	return nil
}
