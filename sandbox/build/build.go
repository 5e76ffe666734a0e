package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/image/drowsefile"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Options say how to make an image from the steps of a build file. File and Tag are required.
type Options struct {
	// File is the text of the build file: package drowsefile.
	File string
	// Context is the directory that COPY and ADD take files from; "" means none.
	Context string
	// Tag is the image's tag, in a form that image.NormalizeTag takes.
	Tag string
	// Args are values for ARG instructions.
	Args map[string]string
	// NoCache runs all steps again, even if their results are known. The new results are kept.
	NoCache bool

	// From says how to make a base image that is a source and not an image of the store: platform, plain HTTP,
	// limits, log. Its Store, From and Tag are ignored. MaxBytes and MaxFiles bound what the steps add as well.
	From builder.Options
	// VM is the VM that commands run in: CPUs, memory, disk, kernel, network and policy. Its Name, Image and
	// Hostname are ignored. Without a network, commands have none.
	VM sandbox.Spec

	// Progress is called for stages, as in builder.Options.
	Progress func(stage string, done, total int64)
	// Begin is called before each step; n counts from 1.
	Begin func(n, of int, step drowsefile.Step)
	// Done is called after each step.
	Done func(n int, step Step)
	// Stdout and Stderr get the output of commands; nil discards it.
	Stdout, Stderr io.Writer
}

// Step is the result of a step.
type Step struct {
	Line   int     `json:"line"`
	Text   string  `json:"text"`
	Cached bool    `json:"cached"`
	Ms     float64 `json:"elapsed_ms"`
}

// Result is the result of a build.
type Result struct {
	Image *image.Image
	Steps []Step
	// Boots is how many VMs the build booted.
	Boots int
}

// StepError is the failure of a command in a build.
type StepError struct {
	Line   int    // in the build file
	Text   string // of the instruction
	Status guest.ExitStatus
}

// Error implements error.
func (e *StepError) Error() string {
	return fmt.Sprintf("line %d: %s: %v", e.Line, e.Text, e.Status)
}

const (
	buildsDir    = "builds"
	buildPrefix  = "build-"
	buildHost    = "drowse-build"
	buildMemory  = 512 // MiB
	maxLayerSays = 4 << 10
	cleanLimit   = time.Minute
	// resolvConf is the VM's own, for its network. It does not become part of the image.
	resolvConf = "etc/resolv.conf"
)

// Image makes an image from the steps of a build file. Commands run in a VM that is made from the image so far.
// Consecutive commands share a VM. When Image returns, the VM and any incomplete image are gone. The image store
// keeps the results of steps, for builds that begin in the same way.
//
// Errors that a caller may look for: drowsefile.ErrSyntax, *StepError, spec.ErrInvalid, fs.ErrNotExist for files
// of the context, those of builder.Build for the base image and of Host.Create for the VM.
func Image(ctx context.Context, s *sandbox.Host, o Options) (_ Result, err error) {
	tag, err := image.NormalizeTag(o.Tag)
	if err != nil {
		return Result{}, err
	}
	file, err := drowsefile.Parse(o.File)
	if err != nil {
		return Result{}, err
	}
	b := &build{s: s, o: o}
	if err := b.checkVM(); err != nil {
		return Result{}, err
	}
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		return Result{}, err
	}
	ref, line, err := file.From(o.Args)
	if err != nil {
		return Result{}, err
	}
	base, err := b.from(ctx, images, ref)
	if err != nil {
		return Result{}, fmt.Errorf("line %d: FROM %s: %w", line, ref, err)
	}
	var run image.RunConfig
	if base != nil {
		run = base.RunConfig
	}
	steps, config, err := file.Build(run, o.Args)
	if err != nil {
		return Result{}, err
	}
	if err := Sweep(ctx, s); err != nil {
		return Result{}, err
	}
	b.asm, err = builder.NewAssembly(ctx, builder.AssemblyOptions{
		Store: images, Base: base, MaxBytes: o.From.MaxBytes, MaxFiles: o.From.MaxFiles, Progress: o.Progress,
	})
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, b.close(ctx)) }()
	if err := b.openContext(); err != nil {
		return Result{}, err
	}
	for n, step := range steps {
		if o.Begin != nil {
			o.Begin(n+1, len(steps), step)
		}
		begin := time.Now()
		cached, err := b.step(ctx, step)
		var failed *StepError
		if errors.As(err, &failed) {
			return b.result, err
		}
		if err != nil {
			return b.result, fmt.Errorf("line %d: %s: %w", step.Line, step.Text, err)
		}
		done := Step{step.Line, step.Text, cached, float64(time.Since(begin).Microseconds()) / 1000}
		b.result.Steps = append(b.result.Steps, done)
		if o.Done != nil {
			o.Done(n+1, done)
		}
	}
	if err := b.endVM(ctx); err != nil {
		return b.result, err
	}
	b.result.Image, err = b.asm.Finish(ctx, config, tag)
	return b.result, err
}

// build is the state of a build.
type build struct {
	s       *sandbox.Host
	o       Options
	asm     *builder.Assembly
	context *os.Root
	ignore  *drowsefile.Ignore
	result  Result

	// The VM, if one was booted.
	vm     string
	lock   *os.File
	client *guest.Client
	below  int // the layers that it was booted with
}

// vmSpec returns the spec of a VM for an image.
func (b *build) vmSpec(name, imageID string) sandbox.Spec {
	vm := b.o.VM
	vm.Name, vm.Image, vm.Hostname = name, imageID, buildHost
	if vm.MemoryMiB == 0 {
		vm.MemoryMiB = buildMemory
	}
	return vm
}

// checkVM reports errors in the VM before the build begins.
func (b *build) checkVM() error {
	if len(b.o.VM.Volumes)+len(b.o.VM.Shares) > 0 {
		return fmt.Errorf("%w: a build has no volumes and no shares", spec.ErrInvalid)
	}
	_, err := b.vmSpec(buildPrefix+"0", "none").WithDefaults()
	return err
}

// scratch is the name in FROM of an empty root file system.
const scratch = "scratch"

// from finds or makes the base image; nil means none.
func (b *build) from(ctx context.Context, images *image.Store, ref string) (*image.Image, error) {
	if ref == scratch {
		return nil, nil
	}
	img, err := images.Find(ref)
	if !errors.Is(err, image.ErrNotFound) {
		return img, err
	}
	if _, perr := builder.ParseSource(ref); perr != nil {
		return nil, fmt.Errorf("%w: it is neither an image of `drowse image ls` nor a source; an image of a registry is written docker://%s", perr, ref)
	}
	o := b.o.From
	o.Store, o.From, o.Tag, o.Progress = images, ref, "", b.o.Progress
	if !strings.HasPrefix(ref, string(builder.KindDebian)+":") {
		o.Mirrors = nil
	}
	return builder.Build(ctx, o)
}

const dockerIgnore = ".dockerignore"

func (b *build) openContext() error {
	if b.o.Context == "" {
		return nil
	}
	var err error
	if b.context, err = os.OpenRoot(b.o.Context); err != nil {
		return fmt.Errorf("opening the context: %w", err)
	}
	f, err := b.context.Open(dockerIgnore)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening the context: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, drowsefile.MaxIgnore+1))
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("reading %s of the context: %w", dockerIgnore, err)
	}
	if b.ignore, err = drowsefile.ParseIgnore(string(text)); err != nil {
		return fmt.Errorf("%s: %w", dockerIgnore, err)
	}
	return nil
}

// step runs one step. It ends a VM whose disk is no longer the image so far.
func (b *build) step(ctx context.Context, step drowsefile.Step) (cached bool, err error) {
	switch {
	case step.Run != nil:
		return b.run(ctx, step)
	case step.Copy != nil:
		if cached, err = b.copy(ctx, step); err != nil {
			return false, err
		}
		return cached, b.endVM(ctx)
	}
	cached, changed, err := b.asm.MakeDir(ctx, step.Workdir, step.Text, b.o.NoCache)
	if err == nil && changed {
		err = b.endVM(ctx)
	}
	return cached, err
}

func (b *build) copy(ctx context.Context, step drowsefile.Step) (cached bool, err error) {
	c := step.Copy
	if len(c.Sources) > 0 && b.context == nil {
		return false, errors.New("there is no context to take files from: give a directory with --context")
	}
	in := builder.CopyIn{
		Context: b.context, Sources: c.Sources, Dest: c.Dest, DestDir: c.DestDir, Unpack: c.Unpack, Owner: c.Owner, Mode: c.Mode,
	}
	if b.ignore != nil {
		in.Ignore, in.Deep = b.ignore.Match, b.ignore.Exceptions()
	}
	for _, f := range c.Inline {
		in.Inline = append(in.Inline, builder.InlineFile(f))
	}
	return b.asm.Copy(ctx, in, step.Text, b.o.NoCache)
}

// run runs a command in the VM, and boots the VM if there is none.
func (b *build) run(ctx context.Context, step drowsefile.Step) (cached bool, err error) {
	key, err := b.asm.Key(struct{ Run *drowsefile.Run }{step.Run})
	if err != nil {
		return false, err
	}
	if !b.o.NoCache && b.asm.Use(key) {
		return true, b.endVM(ctx)
	}
	if err := b.boot(ctx); err != nil {
		return false, err
	}
	r := step.Run
	cmd := guest.Cmd{Argv: r.Argv, Env: r.Env, User: r.User, Dir: r.Dir}
	cmd.Stdout, cmd.Stderr = b.o.Stdout, b.o.Stderr
	status, err := b.client.Exec(ctx, cmd)
	var exit *guest.ExitError
	switch {
	case errors.As(err, &exit) && status != nil:
		return false, &StepError{step.Line, step.Text, *status}
	case err != nil:
		return false, err
	}
	return false, b.capture(ctx, key, step.Text)
}

// boot makes the VM from the image so far.
func (b *build) boot(ctx context.Context) error {
	if b.vm != "" {
		return nil
	}
	img, err := b.asm.Boot(ctx)
	if err != nil {
		return err
	}
	if b.vm, b.lock, err = begin(b.s); err != nil {
		return err
	}
	b.below = b.asm.Layers()
	if b.o.Progress != nil {
		b.o.Progress(StageBoot, 0, 0)
	}
	if _, err := b.s.Create(ctx, b.vmSpec(b.vm, img.ID), sandbox.CreateOptions{}); err != nil {
		return err
	}
	b.result.Boots++
	b.client, err = b.s.Sandbox(b.vm).Agent(ctx)
	return err
}

// StageBoot and StageCapture are stages of a build, in addition to those of package image.
const (
	StageBoot    = "boot"    // starting the VM for commands
	StageCapture = "capture" // reading what a command has written; bytes of content, total unknown (0)
)

// capture makes a layer of what the VM has written since its boot.
func (b *build) capture(ctx context.Context, key, text string) error {
	if b.o.Progress != nil {
		b.o.Progress(StageCapture, 0, 0)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	said := &firstBytes{most: maxLayerSays}
	done := make(chan struct{})
	go func() {
		defer close(done)
		cmd := guest.Cmd{Subsystem: guest.SubsystemLayer}
		cmd.Stdout, cmd.Stderr = w, said
		_, err := b.client.Exec(ctx, cmd)
		var exit *guest.ExitError
		if errors.As(err, &exit) && said.String() != "" {
			err = fmt.Errorf("the guest says: %q", said.String())
		}
		w.CloseWithError(err) // nil ends the stream
	}()
	err := b.asm.Put(ctx, key, text, b.below, r, resolvConf)
	r.CloseWithError(errCaptured) // a writer that still writes fails
	cancel()
	<-done
	if err != nil {
		return fmt.Errorf("taking what the command has written: %w", err)
	}
	return nil
}

var errCaptured = errors.New("the layer has been taken")

// firstBytes keeps the beginning of what is written to it.
type firstBytes struct {
	strings.Builder
	most int
}

// Write implements io.Writer.
func (f *firstBytes) Write(p []byte) (int, error) {
	f.Builder.Write(p[:min(len(p), max(f.most-f.Len(), 0))])
	return len(p), nil
}

// endVM removes the VM, even if ctx has ended.
func (b *build) endVM(ctx context.Context) error {
	if b.client != nil {
		b.client.Close()
		b.client = nil
	}
	if b.vm == "" {
		return nil
	}
	name, lock := b.vm, b.lock
	b.vm, b.lock = "", nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanLimit)
	defer cancel()
	return end(ctx, b.s, name, lock)
}

// close removes the rest of a build.
func (b *build) close(ctx context.Context) error {
	err := b.endVM(ctx)
	if b.context != nil {
		err = errors.Join(err, b.context.Close())
	}
	return errors.Join(err, b.asm.Close())
}

// begin picks a VM name for a build. The lock shows that the build runs.
func begin(s *sandbox.Host) (name string, lock *os.File, err error) {
	dir := filepath.Join(s.State.Dir(), buildsDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, fmt.Errorf("beginning a build: %w", err)
	}
	for range 10 {
		name = buildPrefix + spec.NewID()[:8]
		f, err := osfile.TryOpenLocked(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600, osfile.Exclusive)
		if errors.Is(err, osfile.ErrLocked) {
			continue // a sweep came in between, and removes it
		}
		if err != nil {
			return "", nil, fmt.Errorf("beginning a build: %w", err)
		}
		return name, f, nil
	}
	return "", nil, errors.New("beginning a build: others remove its lock again and again")
}

// end removes the VM of a build, and then its lock.
func end(ctx context.Context, s *sandbox.Host, name string, lock *os.File) error {
	defer lock.Close()
	if err := s.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("removing the VM of a build: %w", err)
	}
	if err := os.Remove(lock.Name()); err != nil {
		return fmt.Errorf("removing the VM of a build: %w", err)
	}
	return nil
}

// Sweep removes the VMs of builds whose process has died.
func Sweep(ctx context.Context, s *sandbox.Host) error {
	dir := filepath.Join(s.State.Dir(), buildsDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for builds that have died: %w", err)
	}
	var errs []error
	for _, e := range entries {
		f, err := os.OpenFile(filepath.Join(dir, e.Name()), os.O_RDWR, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("looking for builds that have died: %w", err))
			continue
		}
		if osfile.TryLock(f, osfile.Exclusive) != nil || !strings.HasPrefix(e.Name(), buildPrefix) {
			f.Close() // the build runs
			continue
		}
		errs = append(errs, end(ctx, s, e.Name(), f))
	}
	return errors.Join(errs...)
}
