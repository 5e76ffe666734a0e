//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/image/drowsefile"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/build"
	"github.com/drowse-vm/drowse/sandbox/e2b/interpreter"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// stepFlags are the flags of an image build that go with --file.
type stepFlags struct {
	file, context string
	recipe        string
	args          []string
	vm            sandbox.Spec
	net           netFlags
}

// onlyWithFile are the flags that need --file, and neverWithFile those that exclude it.
var (
	onlyWithFile  = []string{"context", "build-arg", "memory", "vcpus", "disk", "kernel", "cmdline", "net", "allow", "policy"}
	neverWithFile = []string{"from", "include"}
)

func (f *stepFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVarP(&f.file, "file", "f", "", "build file with the steps, - for stdin")
	fl.StringVar(&f.recipe, "recipe", "", "build an image that drowse has the steps of: "+interpreter.Tag)
	fl.StringVar(&f.context, "context", "", "with --file: source directory of COPY and ADD (default: the directory of the file)")
	fl.StringArrayVar(&f.args, "build-arg", nil, "with --file: NAME=VALUE of an ARG, or NAME to take the value from the environment; repeatable")
	fl.VarP((*mebibytes)(&f.vm.MemoryMiB), "memory", "m", "with --file: RAM of the build VM, such as 2g; a number alone is MiB (default 512)")
	fl.IntVar(&f.vm.VCPUs, "vcpus", 0, fmt.Sprintf("with --file: CPUs of the build VM (default %d)", spec.DefaultVCPUs))
	fl.Var((*mebibytes)(&f.vm.DiskMiB), "disk", fmt.Sprintf("with --file: disk size of the build VM, such as 20g; a number alone is MiB (default %d)", spec.DefaultDiskMiB))
	fl.StringVar(&f.vm.Kernel, "kernel", "", "with --file: kernel of the build VM, as for run")
	fl.StringVar(&f.vm.Cmdline, "cmdline", "", "with --file: additional kernel parameters")
	f.net.add(cmd, "with --file: ", "everything is denied")
}

// useRecipe writes the files of the recipe to a temporary directory, which done removes, and has them built from.
func (f *stepFlags) useRecipe(cmd *cobra.Command, o *builder.Options) (done func() error, err error) {
	done = func() error { return nil }
	if f.recipe == "" {
		return done, nil
	}
	if f.recipe != interpreter.Tag {
		return done, usageError{fmt.Errorf("--recipe %q: there is only %s", f.recipe, interpreter.Tag)}
	}
	for _, name := range []string{"file", "from", "context"} {
		if cmd.Flags().Changed(name) {
			return done, usageError{fmt.Errorf("--%s does not go with --recipe", name)}
		}
	}
	dir, err := os.MkdirTemp("", "drowse-recipe")
	if err != nil {
		return done, err
	}
	done = func() error { return os.RemoveAll(dir) }
	if err := interpreter.Write(dir); err != nil {
		return done, fmt.Errorf("writing the recipe: %w", err)
	}
	f.file, o.Tag = filepath.Join(dir, interpreter.BuildFile), cmp.Or(o.Tag, interpreter.Tag)
	o.Include = append([]string{interpreter.Packages}, o.Include...)
	return done, nil
}

// check refuses flags that exclude each other.
func (f *stepFlags) check(cmd *cobra.Command) error {
	wrong, why := onlyWithFile, "goes with --file only"
	switch {
	case f.recipe != "":
		wrong = nil
	case f.file != "":
		wrong, why = neverWithFile, "does not go with --file: the build file says it with FROM"
	}
	for _, name := range wrong {
		if cmd.Flags().Changed(name) {
			return usageError{fmt.Errorf("--%s %s", name, why)}
		}
	}
	return nil
}

// buildArgs parses the values for ARG.
func buildArgs(list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		if k == "" {
			return nil, usageError{fmt.Errorf("--build-arg %q: use NAME=VALUE", kv)}
		}
		if !ok {
			if v, ok = os.LookupEnv(k); !ok {
				return nil, usageError{fmt.Errorf("--build-arg %s: the environment has no such variable: use %s=VALUE", k, k)}
			}
		}
		out[k] = v
	}
	return out, nil
}

// readFile reads the build file, and returns the directory that is the context.
func (f *stepFlags) readFile(ctx context.Context) (text, dir string, err error) {
	if dir = f.context; dir == "" && f.file != "-" {
		dir = filepath.Dir(f.file)
	}
	data, err := readInput("the build file", f.file, &patientReader{ctx, os.Stdin}, drowsefile.MaxFile)
	return string(data), dir, err
}

// builtOfSteps is an image built from steps, as JSON.
type builtOfSteps struct {
	imageInfo
	Build struct {
		Steps []build.Step `json:"steps"`
		Boots int          `json:"boots"`
	} `json:"build"`
}

// buildSteps builds an image from a build file.
func (a *app) buildSteps(cmd *cobra.Command, f *stepFlags, from builder.Options, templates func(*image.Image) error) error {
	if from.Tag == "" {
		return usageError{errors.New("an image of steps needs a name: use --tag")}
	}
	o := build.Options{Tag: from.Tag, NoCache: from.NoCache, From: from, VM: f.vm}
	o.From.NoCache = false // a base that exists is not a step
	var err error
	if o.Args, err = buildArgs(f.args); err != nil {
		return err
	}
	if o.VM.Policy, o.VM.Network, err = f.net.read(); err != nil {
		return err
	}
	if o.File, o.Context, err = f.readFile(cmd.Context()); err != nil {
		return err
	}
	s, err := a.launching(cmd.Context())
	if err != nil {
		return err
	}
	p := a.newProgress("image build")
	lines := &lineWriter{w: p.log}
	o.Progress, o.Stdout, o.Stderr, o.From.Log = p.report, lines, lines, p.toolLog(a)
	o.Begin = func(n, of int, step drowsefile.Step) {
		fmt.Fprintf(p.log, "image build: [%d/%d] %s\n", n, of, printable(step.Text))
	}
	o.Done = func(_ int, step build.Step) {
		lines.end()
		if step.Cached {
			fmt.Fprintln(p.log, "image build: cached")
		}
	}
	res, err := build.Image(cmd.Context(), s, o)
	lines.end()
	p.finish(err)
	switch {
	case errors.Is(err, drowsefile.ErrSyntax), errors.Is(err, image.ErrInvalidOption), errors.Is(err, image.ErrUnsupportedSource):
		return usageError{err}
	case err != nil:
		return err
	}
	if err := templates(res.Image); err != nil {
		return err
	}
	out := builtOfSteps{imageInfo: infoOf(res.Image)}
	out.Build.Steps, out.Build.Boots = some(res.Steps), res.Boots
	return a.print(out, func(w io.Writer) { fmt.Fprintln(w, strings.Join(res.Image.Tags, " "), res.Image.ShortID()) })
}

// lineWriter passes on whole lines without control characters for the terminal: the lines come from a guest. Any
// goroutine may call its methods.
type lineWriter struct {
	w io.Writer

	mu       sync.Mutex
	buf      []byte
	returned bool // the last character was a carriage return
}

// maxLine is the longest line, in bytes, that lineWriter passes on in one piece.
const maxLine = 8 << 10

// Write implements io.Writer.
func (l *lineWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range p {
		switch {
		case len(l.buf) == 0 && (c == '\r' || c == '\n' && l.returned): // the line has already ended
		case c == '\r' || c == '\n':
			l.flush()
		default:
			if len(l.buf) == maxLine {
				l.flush()
			}
			l.buf = append(l.buf, c)
		}
		l.returned = c == '\r'
	}
	return len(p), nil
}

func (l *lineWriter) flush() {
	fmt.Fprintln(l.w, printable(string(l.buf)))
	l.buf = l.buf[:0]
}

// end passes on a last line without a line end.
func (l *lineWriter) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.buf) > 0 {
		l.flush()
	}
}
