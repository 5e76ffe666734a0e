package jail

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Config says what a confined process is for.
type Config struct {
	// Program is this program with the arguments that lead to Main, without Argument.
	Program []string
	// Shape is what the process makes ahead, if not nil.
	Shape *spec.Shape
	// Shares are those of the VM. Their directories must be known when the process starts.
	Shares []spec.Share
	// Limits bound what the process may use of the host.
	Limits confine.Limits
	// LogOnly has the kernel log forbidden system calls and let them pass: for development.
	LogOnly bool
	// NoDirtyLog is instance.Parts.NoDirtyLog.
	NoDirtyLog bool
	// Output gets the standard error of the process; it must be bounded.
	Output *os.File
	// Started is that of confine.Profile.
	Started func()
}

// Jail is a confined process that waits for its VM. Start or Close ends the wait.
type Jail struct {
	proc confined // nil until it has started
	conn *rpc.Conn
	vm   *VM
	// limits are those in force. Captures, which change them, come one after the other.
	limits confine.Limits
	// trees are the directories of the shares, each as a mount of its own.
	trees []*os.File
	// view is by what the process gets files to read, if it has shares; else nil.
	view *confine.View
}

// confined is a *confine.Process. Tests have others.
type confined interface {
	PID() int
	Kill() error
	Freeze(context.Context) error
	Thaw() error
	Done() <-chan struct{}
	Wait() error
	Stats() (confine.Stats, error)
	CPU() time.Duration
	Urgent(bool)
	SetLimits(confine.Limits) error
	Close() error
}

// New starts a confined process, and returns when it has confined itself and made ahead what Config says.
func New(ctx context.Context, c Config) (j *Jail, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("starting the confined process of a VM: %w", err)
		}
	}()
	mine, its, err := rpc.Pair()
	if err != nil {
		return nil, err
	}
	j = &Jail{limits: c.Limits}
	files := []*os.File{its}
	if len(c.Shares) > 0 && os.Geteuid() != 0 {
		_ = closeAll([]*os.File{mine, its})
		return nil, fmt.Errorf("%w: %w", spec.ErrShare, confine.ErrUserShares)
	}
	if len(c.Shares) > 0 {
		if j.view, err = confine.NewView(); err != nil {
			_ = closeAll([]*os.File{mine, its})
			return nil, err
		}
	}
	for _, sh := range c.Shares {
		tree, dir, err := confine.OpenTree(sh.Source, sh.Writable)
		if err != nil {
			_ = closeAll(append(files, mine))
			_ = j.closeFiles()
			return nil, fmt.Errorf("%w for %s in the guest: %w: put the directory there; its content is not part of a snapshot",
				spec.ErrShare, sh.Path, err)
		}
		j.trees, files = append(j.trees, tree), append(files, dir)
	}
	limits := c.Limits
	limits.LockedBytes = secretBytes
	proc, err := confine.Start(ctx, confine.Profile{
		Program: append(append([]string{"/proc/self/exe"}, c.Program...), Argument), Files: files, Output: c.Output,
		Limits: limits, Shares: len(c.Shares) > 0, LogOnly: c.LogOnly, Started: c.Started,
	})
	_ = closeAll(files)
	if err != nil {
		_ = mine.Close()
		_ = j.closeFiles()
		return nil, err
	}
	j.proc, j.vm = proc, newVM(j)
	if j.conn, err = rpc.New(mine, options(j.vm.serve)); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	ctx, cancel := context.WithTimeout(ctx, prepareTimeout)
	defer cancel()
	order := prepareOrder{Shape: c.Shape, Shares: shareSources(c.Shares), NoDirtyLog: c.NoDirtyLog}
	if err := j.vm.call(ctx, callPrepare, order, nil); err != nil {
		select {
		case <-j.conn.Done():
			err = errors.Join(err, errors.New(j.verdict()))
		default:
		}
		return nil, errors.Join(err, j.Close())
	}
	return j, nil
}

// secretBytes is what the process may lock in memory: as many secrets as a VM may have, each as large as it may be.
const secretBytes = secrets.MaxSecrets * secrets.MaxValue

// prepareTimeout is how long a confined process may take to start. It takes some 20 ms, and more on a busy host.
const prepareTimeout = time.Minute

func shareSources(shares []spec.Share) (out []string) {
	for _, sh := range shares {
		out = append(out, sh.Source)
	}
	return out
}

// PID returns the process id.
func (j *Jail) PID() int { return j.proc.PID() }

// Urgent gives the process a larger share of the processors while it is on.
func (j *Jail) Urgent(on bool) { j.proc.Urgent(on) }

// SetLimits replaces the limits of the process: what is made ahead does not know its VM.
func (j *Jail) SetLimits(l confine.Limits) error {
	j.limits = l
	return j.proc.SetLimits(l)
}

// allow lets the process use more memory, in bytes.
func (j *Jail) allow(more int64) error {
	l := j.limits
	if l.MemoryBytes > 0 {
		l.MemoryBytes += more
	}
	if err := j.SetLimits(l); !errors.Is(err, confine.ErrNoCgroup) {
		return err
	}
	return nil // it was never limited
}

// Close kills the process, and frees what it had of the host. It may be called more than once.
func (j *Jail) Close() error {
	var errs []error
	if j.proc != nil {
		errs = append(errs, j.proc.Kill())
		<-j.proc.Done()
	}
	if j.conn != nil {
		errs = append(errs, j.conn.Close())
	}
	if j.proc != nil {
		errs = append(errs, j.proc.Close())
	}
	return errors.Join(append(errs, j.closeFiles())...)
}

// closeFiles closes what the keeper holds of the files of the shares and of others.
func (j *Jail) closeFiles() error {
	errs := []error{closeAll(j.trees)}
	if j.view != nil {
		errs = append(errs, j.view.Close())
	}
	j.trees, j.view = nil, nil
	return errors.Join(errs...)
}

// toRead opens a file for the process to read.
func (j *Jail) toRead(name string, flags int) (*os.File, error) {
	if j.view != nil {
		return j.view.Open(name, os.O_RDONLY|flags)
	}
	return os.OpenFile(name, os.O_RDONLY|flags, 0)
}

// verdict says how the process has ended.
func (j *Jail) verdict() string {
	_ = j.proc.Kill() // it has closed the connection
	err := j.proc.Wait()
	if err == nil {
		err = errors.New("it has ended by itself")
	}
	if st, serr := j.proc.Stats(); serr == nil && st.OutOfMemory > 0 {
		err = fmt.Errorf("it was out of memory: %w: have fewer VMs awake, or report it if the host has memory left", err)
	}
	return "the VM's confined process has ended: " + err.Error()
}

// sentinels are the errors that keep their identity between the two processes.
var sentinels = sync.OnceValue(control.Sentinels)

// codeOf returns the code of an error that keeps its identity; empty for others.
func codeOf(err error) string { return control.ErrorCode(err) }

// maxText is how much of a text by the child the keeper takes over, in bytes.
const maxText = 4 << 10

// text bounds a text by the child, and makes it one line that does no harm in a terminal or a log.
func text(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s[:min(len(s), maxText)], ""))
}

// Bounds of numbers by the child: sums of a few of them do not overflow.
const (
	maxBytes = 1 << 50
	maxTime  = 365 * 24 * time.Hour
)

func bytesBy(n int64) int64                { return min(max(n, 0), maxBytes) }
func countBy(n uint64) uint64              { return min(n, maxBytes) }
func timeBy(d time.Duration) time.Duration { return min(max(d, 0), maxTime) }
