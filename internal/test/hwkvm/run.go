package hwkvm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

// Defaults and limits of Config.
const (
	DefaultCPUs      = 1 // see "What does not work there"
	MaxCPUs          = 8
	DefaultMemoryMiB = 4096
	MinMemoryMiB     = 256
	MaxMemoryMiB     = 64 << 10
)

const (
	bootLimit   = 5 * time.Minute // a machine that has not started its command by then never will
	signalGrace = 5 * time.Second // how long a command may take to end after SIGINT, SIGTERM or SIGHUP
	// silenceLimit is how long a machine with a running command may be silent.
	silenceLimit = 90 * time.Second
	monitorLimit = 5 * time.Second // how long QEMU may take to report the registers of a hung machine
)

// Config says what to run, and on what machine. Every field but Args and Dir may be zero.
type Config struct {
	Args []string // the program and its arguments; a name without a slash is looked up in PATH of Env
	Env  []string // its whole environment, NAME=VALUE; a folder in memory replaces TMPDIR
	Dir  string   // its working directory, an absolute path on the host

	// Stdin is read ahead of the command; nil is an empty input. A blocked read may outlive Run.
	Stdin          io.Reader
	Stdout, Stderr io.Writer // nil discards

	CPUs      int // 0 is DefaultCPUs
	MemoryMiB int // 0 is DefaultMemoryMiB

	// Signals are passed on to the command's process group. SIGINT, SIGTERM and SIGHUP also end the machine: five
	// seconds later, at the second of them, or at once while the machine boots.
	Signals <-chan os.Signal

	Console    io.Writer // gets a copy of the serial console if not nil
	KernelArgs []string  // come before the kernel's own arguments
	QEMUArgs   []string  // come after QEMU's own arguments

	silence time.Duration // replaces silenceLimit if not 0
}

// ErrHung means that a machine stopped: its kernel, or the processor that QEMU emulates.
var ErrHung = errors.New("it hangs: it has given no sign of life")

// Result says how the command ended.
type Result struct {
	Status      int           // exit status; 128+n if signal n ended it, 126 and 127 as in a shell
	Message     string        // why it could not start, or empty
	OutOfMemory string        // the kernel's line if it killed a process for want of memory, or empty
	Boot        time.Duration // from the start of QEMU to the start of the command; 0 if it never started
	Total       time.Duration // from the start of QEMU to its end
}

// MachineError means that the machine failed, not the command.
type MachineError struct {
	Reason  string
	Err     error  // ErrHung, or nil
	Console string // QEMU's own messages and the lines of the serial console that matter: the last, or a panic's first
}

func (e *MachineError) Error() string {
	if e.Console == "" {
		return "the virtual machine failed: " + e.Reason
	}
	return "the virtual machine failed: " + e.Reason + "\nconsole:\n" + e.Console
}

// Unwrap returns Err.
func (e *MachineError) Unwrap() error { return e.Err }

// Run starts a machine, runs the command in it, and waits for both to end. If ctx ends first, Run kills the
// machine and the error wraps ctx.Err(). The command sees the host's file system as its root, with the host user's
// rights, through 9p. /proc, /sys, /dev and /run are the machine's own. Run may be called concurrently; each call
// has its own machine.
//
// QEMU never outlives the calling process, however that ends.
func (im *Image) Run(ctx context.Context, cfg Config) (Result, error) {
	if err := cfg.fill(); err != nil {
		return Result{}, err
	}
	m, err := im.start(cfg)
	if err != nil {
		return Result{}, err
	}
	return m.run(ctx, cfg)
}

// run is the rest of Run: the machine has started, and is gone when run returns.
func (m *machine) run(ctx context.Context, cfg Config) (Result, error) {
	// Not as soon as QEMU has ended: the socket may still have the unread result.
	defer m.port.Close()
	defer m.monitor.Close()
	defer m.kill()
	defer context.AfterFunc(ctx, m.kill)()
	boot := time.AfterFunc(bootLimit, m.kill)
	defer boot.Stop()

	s := &session{cfg: cfg, m: m, out: wire.NewWriter(m.port), booted: func() { boot.Stop() }}
	s.silence = time.AfterFunc(time.Hour, s.hangs)
	s.silence.Stop()
	res, err := s.run()
	s.silence.Stop()
	m.kill()
	<-m.done
	res.Total = time.Since(m.started)
	res.OutOfMemory = lastWith(m.console.lines(), markOOM)
	switch {
	case err == nil:
		return res, nil
	case ctx.Err() != nil:
		return res, fmt.Errorf("the virtual machine was stopped: %w", ctx.Err())
	case errors.Is(err, errForced):
		return res, nil
	}
	var broken *MachineError
	if errors.As(err, &broken) {
		broken.Console = excerpt(m.console.lines(), m.qemu.lines())
		return res, broken
	}
	reason := diagnose(m.console.lines(), m.qemu.lines())
	if res.Boot == 0 && time.Since(m.started) >= bootLimit {
		reason = fmt.Sprintf("it did not boot within %v", bootLimit)
	}
	return res, &MachineError{Reason: reason, Console: excerpt(m.console.lines(), m.qemu.lines())}
}

func (c *Config) fill() error {
	if len(c.Args) == 0 {
		return errors.New("no command to run")
	}
	if !strings.HasPrefix(c.Dir, "/") {
		return fmt.Errorf("working directory %q is not an absolute path", c.Dir)
	}
	if c.CPUs == 0 {
		c.CPUs = DefaultCPUs
	}
	if c.MemoryMiB == 0 {
		c.MemoryMiB = DefaultMemoryMiB
	}
	if c.CPUs < 1 || c.CPUs > MaxCPUs {
		return fmt.Errorf("%d CPUs asked for; 1 to %d are possible", c.CPUs, MaxCPUs)
	}
	if c.MemoryMiB < MinMemoryMiB || c.MemoryMiB > MaxMemoryMiB {
		return fmt.Errorf("%d MiB of memory asked for; %d to %d are possible", c.MemoryMiB, MinMemoryMiB, MaxMemoryMiB)
	}
	if c.silence == 0 {
		c.silence = silenceLimit
	}
	for _, w := range []*io.Writer{&c.Stdout, &c.Stderr} {
		if *w == nil {
			*w = io.Discard
		}
	}
	return nil
}

// Numbers of the file descriptors that QEMU inherits.
const (
	portFD    = 3
	consoleFD = 4
	monitorFD = 5
)

// kernelArgs returns the kernel's command line. Our options take the first value, the kernel's the last.
func (c *Config) kernelArgs() string {
	return strings.Join(append(append([]string{}, c.KernelArgs...),
		"hwkvm.9p=msize=512000,cache=loose", "console=ttyS0", "quiet", "panic=-1", "mitigations=off", "tsc=reliable",
		"no_timer_check", "random.trust_cpu=on", "cgroup_no_v1=all"), " ")
}

func (im *Image) qemuArgs(c Config) []string {
	return append([]string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", "q35", "-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max,+svm,+npt",
		"-smp", strconv.Itoa(c.CPUs), "-m", strconv.Itoa(c.MemoryMiB),
		"-kernel", im.Kernel, "-initrd", im.Initramfs, "-append", c.kernelArgs(),
		"-chardev", "socket,id=port,fd=" + strconv.Itoa(portFD),
		"-chardev", "socket,id=console,fd=" + strconv.Itoa(consoleFD),
		"-serial", "chardev:console",
		"-chardev", "socket,id=monitor,fd=" + strconv.Itoa(monitorFD),
		"-mon", "chardev=monitor,mode=readline",
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,name=" + wire.PortName,
		"-fsdev", "local,id=host,path=/,security_model=none,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=host,mount_tag=" + wire.MountTag,
	}, c.QEMUArgs...)
}

// machine is one QEMU process.
type machine struct {
	port          *os.File // the virtio-serial port of the machine; Run closes it
	monitor       *os.File // QEMU's monitor, for people; Run closes it
	console, qemu *console
	started       time.Time
	process       *os.Process
	done          chan struct{} // closed when QEMU has ended and its output is read
	killed        sync.Once
}

// socketpair returns our end and the child's. Both are closed on exec unless handed over.
func socketpair(name string) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	// Only ours: non-blocking, so that closing the file ends a waiting read or write.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name), nil
}

func (im *Image) start(cfg Config) (*machine, error) {
	port, portPeer, err := socketpair("virtio-serial port")
	if err != nil {
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	defer portPeer.Close()
	serial, serialPeer, err := socketpair("serial console")
	if err != nil {
		port.Close()
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	defer serialPeer.Close()
	monitor, monitorPeer, err := socketpair("monitor")
	if err != nil {
		port.Close()
		serial.Close()
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	defer monitorPeer.Close()

	m := &machine{port: port, monitor: monitor, console: &console{tee: cfg.Console}, qemu: &console{}, done: make(chan struct{})}
	cmd := exec.Command(im.QEMU, im.qemuArgs(cfg)...)
	cmd.Stdout, cmd.Stderr = m.qemu, m.qemu
	cmd.ExtraFiles = []*os.File{portFD - 3: portPeer, consoleFD - 3: serialPeer, monitorFD - 3: monitorPeer}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:    true, // an interrupt from the terminal is for us to handle
		Pdeathsig: syscall.SIGKILL,
	}
	startErr := make(chan error)
	go func() {
		// The parent that PR_SET_PDEATHSIG watches is this thread (prctl(2)): it must live as long as QEMU.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		m.started = time.Now()
		err := cmd.Start()
		m.process = cmd.Process
		startErr <- err
		if err != nil {
			return
		}
		var serialRead sync.WaitGroup
		serialRead.Go(func() { _, _ = io.Copy(m.console, serial) })
		// How it ended does not matter: m is always killed in the end. Its output is in m.qemu.
		_ = cmd.Wait()
		serialRead.Wait()
		serial.Close()
		close(m.done)
	}()
	if err := <-startErr; err != nil {
		port.Close()
		serial.Close()
		monitor.Close()
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	return m, nil
}

// kill ends QEMU. Nothing is lost: the command's output reached the host before the report of its end.
func (m *machine) kill() {
	m.killed.Do(func() {
		// It fails only if the process has ended.
		_ = m.process.Kill()
	})
}

// registers asks QEMU twice where the processors are, which tells a loop from a halt. It returns as much of an
// answer as it gets.
func (m *machine) registers() string {
	if err := m.monitor.SetDeadline(time.Now().Add(monitorLimit)); err != nil {
		return ""
	}
	var b strings.Builder
	lines := bufio.NewScanner(m.monitor)
	for range 2 {
		// Our own line marks the end of the answer: the monitor echoes its input.
		if _, err := io.WriteString(m.monitor, "info registers -a\nprint 0\n"); err != nil {
			return b.String()
		}
		for lines.Scan() && strings.TrimSpace(lines.Text()) != "0" {
			if l := lines.Text(); strings.HasPrefix(l, "CPU#") || strings.HasPrefix(l, "RIP=") {
				fmt.Fprintln(&b, strings.TrimSpace(l))
			}
		}
	}
	return b.String()
}

// errForced means that a signal ended the machine before the command had ended.
var errForced = errors.New("ended by a signal")

// session is the conversation with init.
type session struct {
	cfg    Config
	m      *machine
	out    *wire.Writer
	booted func()
	// silence runs while the session listens to the machine, and kills the machine when it expires.
	silence *time.Timer

	mu        sync.Mutex // guards the rest
	started   bool
	forced    syscall.Signal // the signal that made us kill the machine
	hung      bool
	registers string // of a hung machine
}

// hangs notes the state of the processors, and kills the machine.
func (s *session) hangs() {
	registers := s.m.registers()
	s.mu.Lock()
	s.hung, s.registers = true, registers
	s.mu.Unlock()
	s.m.kill()
}

// listen returns the next frame. The machine must show life while listen waits.
func (s *session) listen(in *wire.Reader) (wire.Type, []byte, error) {
	s.mu.Lock()
	started := s.started
	s.mu.Unlock()
	if started {
		s.silence.Reset(s.cfg.silence)
		defer s.silence.Stop()
	}
	return in.Next()
}

func (s *session) run() (Result, error) {
	ended := make(chan struct{})
	var watchers sync.WaitGroup
	defer watchers.Wait()
	defer close(ended)
	watchers.Go(func() { s.passSignals(ended) })

	env := append([]string{}, s.cfg.Env...)
	env = append(env, "TMPDIR="+wire.TempDir)
	cmd := wire.Command{Args: s.cfg.Args, Env: lastWins(env), Dir: s.cfg.Dir, Time: time.Now().UnixNano()}
	// The socket takes little until the machine has booted: the send must not delay the receiver.
	sent := make(chan error, 1)
	go func() { sent <- s.out.SendCommand(cmd) }()

	acks := make(chan uint32, wire.StdinWindow) // one for each frame in flight, so never full
	defer close(acks)
	in := wire.NewReader(s.m.port)
	var res Result
	for {
		t, p, err := s.listen(in)
		if err != nil {
			return s.broken(res, err)
		}
		switch t {
		case wire.Started:
			s.booted()
			s.setStarted()
			res.Boot = time.Since(s.m.started)
			go s.passStdin(acks)
			go s.nudge(ended)
		case wire.Stdout, wire.Stderr:
			w := s.cfg.Stdout
			if t == wire.Stderr {
				w = s.cfg.Stderr
			}
			if _, err := w.Write(p); err != nil {
				return res, &MachineError{Reason: fmt.Sprintf("the command's output cannot be passed on: %v", err)}
			}
		case wire.Alive:
		case wire.StdinAck:
			n, err := wire.Uint32(p)
			if err != nil {
				return res, &MachineError{Reason: err.Error()}
			}
			acks <- n
		case wire.Exit:
			var r wire.Result
			if err := json.Unmarshal(p, &r); err != nil {
				return res, &MachineError{Reason: fmt.Sprintf("the result cannot be read: %v", err)}
			}
			res.Status, res.Message = r.Status(), r.Error
			if res.Status == wire.StatusRunner && r.Error != "" {
				return res, &MachineError{Reason: r.Error}
			}
			return res, nil
		default:
			return res, &MachineError{Reason: fmt.Sprintf("frame of unknown type %d", t)}
		}
		select {
		case err := <-sent:
			if err != nil {
				return s.broken(res, err)
			}
		default:
		}
	}
}

// nudge interrupts the machine now and then, since QEMU may lose its timer's interrupt. Otherwise the interrupts
// do no harm.
func (s *session) nudge(ended <-chan struct{}) {
	tick := time.NewTicker(wire.NudgeInterval)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
			// A send that fails or blocks ends with the connection, which the receiver sees as well.
			if s.out.Send(wire.Nudge, nil) != nil {
				return
			}
		}
	}
}

// broken explains the end of the connection.
func (s *session) broken(res Result, err error) (Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forced != 0 {
		res.Status = wire.StatusSignal + int(s.forced)
		return res, errForced
	}
	if s.hung {
		reason := fmt.Sprintf("%v for %v\n%s", ErrHung, s.cfg.silence, s.registers)
		return res, &MachineError{Reason: strings.TrimSpace(reason), Err: ErrHung}
	}
	return res, err
}

// lastWins removes all but the last value of each variable.
func lastWins(env []string) []string {
	last := map[string]int{}
	for i, e := range env {
		name, _, _ := strings.Cut(e, "=")
		last[name] = i
	}
	var out []string
	for i, e := range env {
		if name, _, _ := strings.Cut(e, "="); last[name] == i {
			out = append(out, e)
		}
	}
	return out
}

func (s *session) setStarted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = true
}

func (s *session) force(sig syscall.Signal) {
	s.mu.Lock()
	s.forced = sig
	s.mu.Unlock()
	s.m.kill()
}

func (s *session) passSignals(ended <-chan struct{}) {
	var ending syscall.Signal
	var grace <-chan time.Time
	for {
		select {
		case <-ended:
			return
		case <-grace:
			s.force(ending)
			return
		case sig, ok := <-s.cfg.Signals:
			n, isUnix := sig.(syscall.Signal)
			if !ok {
				s.cfg.Signals = nil
				continue
			}
			if !isUnix {
				continue
			}
			ends := n == syscall.SIGINT || n == syscall.SIGTERM || n == syscall.SIGHUP
			s.mu.Lock()
			started := s.started
			s.mu.Unlock()
			if ends && (!started || ending != 0) {
				s.force(n)
				return
			}
			if !started {
				continue
			}
			// A failed send means that the connection has ended, which the receiver sees as well.
			_ = s.out.SendUint32(wire.Signal, uint32(n))
			if ends {
				ending, grace = n, time.After(signalGrace)
			}
		}
	}
}

// passStdin sends the standard input, at most wire.StdinWindow bytes ahead of the command. It ignores errors of
// sending: the receiver sees the broken connection too.
func (s *session) passStdin(acks <-chan uint32) {
	flying := 0
	if s.cfg.Stdin != nil {
		buf := make([]byte, wire.MaxPayload)
		for {
			n, err := s.cfg.Stdin.Read(buf)
			for n > 0 && flying+n > wire.StdinWindow {
				ack, ok := <-acks
				if !ok {
					return
				}
				flying -= int(ack)
			}
			if n > 0 {
				flying += n
				if s.out.Send(wire.Stdin, buf[:n]) != nil {
					return
				}
			}
			if err != nil {
				break
			}
		}
	}
	_ = s.out.Send(wire.StdinEOF, nil)
}
