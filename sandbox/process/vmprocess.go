package process

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/jail"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
)

// PrepareProcess prepares the Go runtime of this process for a VM: it raises GOMAXPROCS to 16, unless the
// environment sets it. A vCPU in KVM_RUN, a device worker that waits for its queue and a fault handler in an ioctl
// are system calls to Go. Go takes their processor away only after 20 microseconds to 10 milliseconds, one after
// the other. On a machine with few CPUs, runnable goroutines would wait for that in the middle of a resume.
// ServeProcess calls this; other programs that call Restore must call it themselves.
func PrepareProcess() {
	const procs = 16
	if os.Getenv(control.GoMaxProcsEnv) == "" && runtime.GOMAXPROCS(0) < procs {
		runtime.GOMAXPROCS(procs)
	}
}

// maxPause is how long PauseGC may stop the garbage collector.
const maxPause = time.Second

// PauseGC stops the garbage collector of this process until resume is called, for the time of a restore: the
// collector would take a processor from the restore, and stop it. ServeProcess calls this; other programs that
// call Restore call it themselves. resume may be called more than once. After a second it is called in any case.
func PauseGC() (resume func()) {
	percent := debug.SetGCPercent(-1)
	if percent < 0 {
		return func() {} // it was off before
	}
	var once sync.Once
	undo := func() { once.Do(func() { debug.SetGCPercent(percent) }) }
	limit := time.AfterFunc(maxPause, undo)
	return func() {
		limit.Stop()
		undo()
	}
}

// ServeProcess runs a process that a Launcher has started. args are what follows Launcher.Command. The process
// belongs, or will belong, to one VM, so ServeProcess changes process-wide settings: see PrepareProcess and
// PauseGC. In a process that has stood by it also redirects standard output and error. It returns when the VM has
// ended or sleeps. SIGTERM, which a host that shuts down sends to each process, puts the VM to sleep. When ctx
// ends, the VM is stopped as if its power were cut.
func ServeProcess(ctx context.Context, args []string) error {
	return ServeProcessWith(ctx, args, ProcessOptions{})
}

// ProcessOptions are options of ServeProcessWith. The zero value is ServeProcess.
type ProcessOptions struct {
	// HostHooks are called after the VM's creation or wake was reported, and before it sleeps: see Host.WithHostHooks.
	HostHooks []hosthooks.Func
}

// ServeProcessWith is ServeProcess with options. All processes of the program must use the same ones, because a
// process that stands by may become that of any VM.
func ServeProcessWith(ctx context.Context, args []string, o ProcessOptions) (err error) {
	switch {
	case len(args) == 1 && args[0] == jail.Argument:
		return jail.Main()
	case len(args) == 1 && args[0] == network.Argument:
		return network.Main()
	}
	var (
		dir     string
		standby bool
		shape   spec.Shape
		ord     control.Order
	)
	f := flag.NewFlagSet("the process of a VM", flag.ContinueOnError)
	f.SetOutput(io.Discard) // the error says it
	f.StringVar(&dir, "state", "", "the store's directory")
	f.Func("order", "a control.Order, as JSON", func(text string) error { return json.Unmarshal([]byte(text), &ord) })
	f.Func("standby", "prepare for VMs of this spec.Shape, as JSON, and wait for an order on a socket", func(text string) error {
		standby = true
		return json.Unmarshal([]byte(text), &shape)
	})
	if err := f.Parse(args); err != nil {
		return fmt.Errorf("the arguments of a VM's process: %w", err)
	}
	if f.NArg() > 0 {
		return fmt.Errorf("the arguments of a VM's process: %q is one too many", f.Arg(0))
	}
	if dir == "" || !standby && ord.Name == "" {
		return errors.New("the arguments of a VM's process: it has no state directory or no order: drowse starts this program, not a person")
	}
	terminated, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	if err := unix.CloseRange(control.ReportFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("keeping files from programs that the process of a VM starts: %w", err)
	}
	s, err := state.OpenStore(dir)
	if err != nil {
		return err
	}
	s = s.WithHostHooks(o.HostHooks...)
	program := os.Args[1 : len(os.Args)-len(args)]
	if standby {
		PrepareProcess()
		return standBy(ctx, terminated, s, program, shape)
	}
	ahead, err := makeJail(program, nil)
	if err != nil {
		return err
	}
	PrepareProcess() // while the confined process starts
	defer func() { err = errors.Join(err, ahead.Close()) }()
	files := []*os.File{os.NewFile(control.ReportFD, "report")}
	if ord.Third() {
		files = append(files, os.NewFile(control.ThirdFD, "fork or hold"))
	}
	return obey(ctx, terminated, s, ord, files, madeAhead{jail: ahead, calm: func() {}})
}

// madeAhead is what was made for a VM before its order.
type madeAhead struct {
	jail *jailAhead
	vm   *instance.Prebuilt // in this process, if nothing is confined
	link *network.Prebuilt
	calm func() // ends the priority that a process has while it stands by
}

// obey carries out an order. The VM goes to sleep when terminated ends. The first of files is for the report.
func obey(ctx, terminated context.Context, s *state.Store, ord control.Order, files []*os.File, ahead madeAhead) error {
	report := files[0]
	var fork, hold *os.File
	switch {
	case ord.Fork && ord.WakeLock:
		return errors.New("an order of a fork that is held: there is no such")
	case ord.Fork:
		fork = files[1]
	case ord.WakeLock:
		hold = files[1]
	}
	out, err := boundLog(s, ord.Name)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(out, nil)).With("vm", ord.Name)
	ready := func() {}
	if ord.Snapshot != "" || ord.Fork {
		calm, collect := prioritize(), PauseGC()
		ready = func() { calm(); collect() }
		defer ready()
	}
	ahead.calm()
	ahead.jail.awaitStart()
	var machines Machines
	if ahead.jail != nil {
		machines = jailedMachines{ahead: ahead.jail, store: s, log: out}
	}
	return Serve(ctx, s, ord.Name, ServeOptions{
		Snapshot: ord.Snapshot, NewIdentity: ord.NewIdentity, Template: ord.Template, Fork: fork, Prebuilt: ahead.vm, Link: ahead.link, Log: log,
		Cause: ord.Cause, Machines: machines, prioritize: prioritize, WakeLock: hold, terminated: terminated,
		Wanted: func() bool { return control.HasReader(report) },
		Report: func(r control.Report) {
			if err := json.NewEncoder(report).Encode(r); err != nil {
				log.Warn("nobody reads the report", "error", err)
			}
			report.Close()
			ready()
		},
	})
}

// standBy prepares for a VM, says so, and waits for the order. Without an order it returns when the other end of
// the socket is closed, or terminated ends.
func standBy(ctx, terminated context.Context, s *state.Store, program []string, shape spec.Shape) (err error) {
	var ahead madeAhead
	if ahead.jail, err = makeJail(program, &shape); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ahead.jail.Close()) }()
	if shape.Network {
		ahead.link = network.NewPrebuilt()
		defer func() { err = errors.Join(err, ahead.link.Close()) }()
	}
	// Do now what a restore would otherwise do for the first time.
	_ = warmUp() // if it fails, so does the wake, which reports why
	confined, err := ahead.jail.wait()
	if err != nil {
		return err
	}
	if !confined {
		_ = snapshot.PrepareDecoders(pager.DefaultHandlers + 1) // likewise; one more for the working set
		if ahead.vm, err = instance.NewPrebuilt(shape, instance.PrebuiltOptions{NoDirtyLog: noDirtyLog()}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, ahead.vm.Close()) }()
	}
	ahead.calm = raise()
	defer ahead.calm()
	PauseGC()()
	runtime.GC()
	// Without a goal for the heap, the runtime keeps what is free of it: to get it back takes a wake's time.
	percent := debug.SetGCPercent(-1)
	conn, err := control.FileConn(os.NewFile(control.PoolFD, "pool"))
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, c := range []context.Context{ctx, terminated} {
		defer context.AfterFunc(c, func() { conn.Close() })()
	}
	if _, err := conn.Write([]byte(control.PoolReady)); err != nil {
		return fmt.Errorf("standing by for a VM: %w", err)
	}
	ord, files, err := control.ReceiveOrder(conn)
	if err == nil {
		_, err = conn.Write([]byte(control.PoolTaken))
	}
	if errors.Is(err, io.EOF) || err != nil && (ctx.Err() != nil || terminated.Err() != nil) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("standing by for a VM: %w", err)
	}
	conn.Close()
	debug.SetGCPercent(percent)
	if err := standardFiles(files[0]); err != nil {
		return fmt.Errorf("opening the log of VM %s: %w", ord.Name, err)
	}
	files[0].Close()
	return obey(ctx, terminated, s, ord, files[1:], ahead)
}
