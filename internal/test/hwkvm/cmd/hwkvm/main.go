// Command hwkvm runs a command on a hardware-style KVM: as root in a virtual machine that has the host's file system
// and a standard /dev/kvm. See package hwkvm for what that is worth.
//
//	hwkvm [flags] -- CMD ARGS...
//	go test -exec "hwkvm --" ./...
//
// Its exit status is the command's: 128+n if signal n ended it, 126 or 127 if it could not be started. 124 says that
// the time limit was reached, 125 that hwkvm itself or the machine failed, 2 that the command line is wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/test/hwkvm"
	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

const (
	statusUsage = 2
	// drainGrace is how long after the time limit a reader that does not take our output can hold us up.
	drainGrace = 5 * time.Second
)

func main() { os.Exit(run(os.Args[1:])) }

type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

type options struct {
	cache      string
	timeout    time.Duration
	cpus       int
	memory     int
	env        list
	console    string
	kernelArgs list
	qemuArgs   list
	prepare    bool
	verbose    bool
	args       []string
}

func parse(args []string, usage io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("hwkvm", flag.ContinueOnError)
	f.SetOutput(usage)
	f.StringVar(&o.cache, "cache", "", "`folder` for the kernel and the initramfs (default $"+hwkvm.CacheEnv+", else in the user's cache folder)")
	f.DurationVar(&o.timeout, "timeout", 0, "kill the machine after this `time`, boot included; the exit status is then 124")
	f.IntVar(&o.cpus, "cpus", hwkvm.DefaultCPUs, "`number` of virtual CPUs")
	f.IntVar(&o.memory, "memory", hwkvm.DefaultMemoryMiB, "memory of the machine in `MiB`")
	f.Var(&o.env, "env", "pass on the environment variable `NAME`, or set NAME=VALUE; repeatable (PATH, HOME, TERM, TZ, LANG, LC_*, GO*, DROWSE_* and such are passed anyway)")
	f.StringVar(&o.console, "console", "", "write the serial console to this `file`")
	f.Var(&o.kernelArgs, "kernel-arg", "`argument` for the kernel; repeatable")
	f.Var(&o.qemuArgs, "qemu-arg", "`argument` for QEMU; repeatable")
	f.BoolVar(&o.prepare, "prepare", false, "only fill the cache")
	f.BoolVar(&o.verbose, "v", false, "say how long the machine took to boot")
	f.Usage = func() {
		fmt.Fprintln(usage, "usage: hwkvm [flags] -- CMD ARGS...\nRuns CMD on a hardware-style KVM that QEMU emulates.")
		f.PrintDefaults()
	}
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.args = f.Args()
	if len(o.args) == 0 && !o.prepare {
		err := errors.New("no command given")
		fmt.Fprintln(usage, "hwkvm:", err)
		f.Usage()
		return o, err
	}
	return o, nil
}

// passed are the environment variables that a command is given; a trailing * stands for any ending.
var passed = []string{
	"CI", "COLORTERM", "DROWSE_*", "GO*", "HOME", "LANG", "LC_*", "LOGNAME", "NO_COLOR", "PATH", "PWD", "SHELL", "TERM", "TZ", "USER",
}

// environment selects what the command gets of env, plus what the -env flags say.
func environment(env []string, extra []string) []string {
	wanted := func(name string) bool {
		return slices.ContainsFunc(passed, func(p string) bool {
			prefix, open := strings.CutSuffix(p, "*")
			return name == p || open && strings.HasPrefix(name, prefix)
		}) || slices.Contains(extra, name)
	}
	var out []string
	for _, e := range env {
		if name, _, _ := strings.Cut(e, "="); wanted(name) {
			out = append(out, e)
		}
	}
	for _, e := range extra {
		if strings.Contains(e, "=") {
			out = append(out, e)
		}
	}
	return out
}

func run(args []string) int {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	o, err := parse(args, os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return statusUsage
	}
	ctx, cancel := context.WithCancel(context.Background())
	if o.timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, o.timeout)
	}
	defer cancel()
	status := make(chan int, 1)
	go func() { status <- execute(ctx, o) }()
	select {
	case s := <-status:
		return s
	case <-ctx.Done():
	}
	select {
	case s := <-status:
		return s
	case <-time.After(drainGrace):
		return wire.StatusTimeout
	}
}

func execute(ctx context.Context, o options) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "hwkvm:", err)
		if errors.Is(err, context.DeadlineExceeded) {
			return wire.StatusTimeout
		}
		return wire.StatusRunner
	}
	image, err := hwkvm.Prepare(ctx, o.cache)
	if err != nil {
		return fail(err)
	}
	if o.prepare {
		return 0
	}
	dir, err := os.Getwd()
	if err != nil {
		return fail(err)
	}
	cfg := hwkvm.Config{
		Args: o.args, Env: environment(os.Environ(), o.env), Dir: dir,
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		CPUs: o.cpus, MemoryMiB: o.memory, KernelArgs: o.kernelArgs, QEMUArgs: o.qemuArgs,
	}
	if o.console != "" {
		f, err := os.Create(o.console)
		if err != nil {
			return fail(err)
		}
		defer f.Close()
		cfg.Console = f
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	cfg.Signals = signals
	res, err := image.Run(ctx, cfg)
	if res.OutOfMemory != "" {
		fmt.Fprintf(os.Stderr, "hwkvm: the kernel inside says: %s (more than -memory %d?)\n", res.OutOfMemory, o.memory)
	}
	if err != nil {
		return fail(err)
	}
	if res.Message != "" {
		fmt.Fprintln(os.Stderr, "hwkvm:", res.Message)
	}
	if o.verbose {
		fmt.Fprintf(os.Stderr, "hwkvm: kernel %s, boot %v, total %v, status %d\n", image.Release, res.Boot.Round(time.Millisecond), res.Total.Round(time.Millisecond), res.Status)
	}
	return res.Status
}
