package machine

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agent/early"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Machine is what the agent can change about the machine as a whole.
type Machine interface {
	// SetClock sets CLOCK_REALTIME by what it had to be at asOf, which has a monotonic reading: a Unix time in
	// nanoseconds. It may leave a clock that is right to within a millisecond.
	SetClock(wallNanos int64, asOf time.Time) error
	// AddEntropy mixes 32 to 512 bytes into the kernel's random number
	// generator, credits them in full and reseeds it.
	AddEntropy(p []byte) error
	// NewIdentity gives the machine a new boot id and machine id, and the hostname if it is not empty. It returns
	// the boot id.
	NewIdentity(hostname string) (string, error)
	// Freeze makes everything written to the writable disk durable, and blocks all writers to its file system.
	// Thaw unblocks them; it is not an error if nothing is frozen.
	Freeze() error
	Thaw() error
	// Trim makes everything written to the writable disk durable, and tells the disk to discard the blocks that
	// its file system does not use.
	Trim() error
	// Power stops the machine. It returns only if it fails.
	Power(reboot bool) error
}

// Kernel is the agent's machine. Its methods must not be called concurrently; Server ensures it.
type Kernel struct {
	// BeforePower, when set, is called after all processes have ended and
	// before the machine stops: it makes the file systems read-only.
	BeforePower func()
	// Writable is a directory of the file system that Freeze freezes. It is empty if there is no lasting one.
	Writable string

	frozen  *os.File // open while frozen
	random  *os.File // kept open for the wake path
	noRekey bool     // this kernel has no RNDREKEYCRNG
	entropy randPoolInfo
	rekey   [rekeySize]byte
	bootID  string // file mounted over bootIDPath, once one is
}

const (
	bootIDPath    = "/proc/sys/kernel/random/boot_id"
	machineIDPath = "/etc/machine-id"
	bootIDFile    = "/run/drowse/boot_id"
	nanosPerSec   = 1_000_000_000
	uuidSize      = 36 // as text
)

// clockSlack is the error of the clock below which SetClock leaves it. Where the guest's TSC went on during a
// sleep, as it does if the host is a virtual machine that cannot stop it, the clock is right. Setting it would
// cost the kernel thousands of instructions: the kernel then checks all timers.
const clockSlack = time.Millisecond

// The pages that setting the clock needs may come from the snapshot only now: on a busy host this can take seconds, by
// which the clock is then behind. If it is by more than clockMissed, SetClock sets it again, at most clockSets times.
const (
	clockMissed = 10 * time.Millisecond
	clockSets   = 3
)

// SetClock implements Machine.
func (k *Kernel) SetClock(wallNanos int64, asOf time.Time) error {
	if wallNanos <= 0 {
		return fmt.Errorf("set the clock to %d ns: %w", wallNanos, unix.EINVAL)
	}
	errno := setClock(wallNanos, func() (int64, time.Duration) {
		now := time.Now()
		return now.UnixNano(), now.Sub(asOf) // by CLOCK_MONOTONIC
	}, rawClockSettime)
	if errno != 0 {
		return fmt.Errorf("set the clock: %w", errno)
	}
	return nil
}

// setClock is SetClock for a clock that set sets. now says what it is, and how long ago it had to be wallNanos.
func setClock(wallNanos int64, now func() (is int64, ago time.Duration), set func(sec, nsec int64) syscall.Errno) syscall.Errno {
	slack := clockSlack
	for range clockSets {
		is, ago := now()
		want := wallNanos + int64(ago)
		if time.Duration(want-is).Abs() < slack {
			return 0
		}
		if errno := set(want/nanosPerSec, want%nanosPerSec); errno != 0 {
			return errno
		}
		slack = clockMissed
	}
	return 0
}

// Prepare opens what AddEntropy needs, so that the wake path does not have to.
func (k *Kernel) Prepare() error {
	if k.random != nil {
		return nil
	}
	f, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open the random number generator: %w", err)
	}
	k.random = f
	return nil
}

// AddEntropy implements Machine: RNDADDENTROPY and RNDRESEEDCRNG of random(4). For rekeySize bytes it uses
// RNDREKEYCRNG, if the kernel has it, which does the same in one step with a sixth of the work.
func (k *Kernel) AddEntropy(p []byte) error {
	if len(p) < agentpb.MinEntropy || len(p) > len(k.entropy.buf) {
		return fmt.Errorf("add %d bytes of entropy, want %d to %d: %w", len(p), agentpb.MinEntropy, len(k.entropy.buf), unix.EINVAL)
	}
	if err := k.Prepare(); err != nil {
		return err
	}
	if len(p) == rekeySize && !k.noRekey {
		copy(k.rekey[:], p)
		errno := rawRekey(k.random.Fd(), &k.rekey)
		clear(k.rekey[:])
		if errno == 0 {
			return nil
		}
		k.noRekey = errno == unix.EINVAL || errno == unix.ENOTTY
	}
	k.entropy.entropyCount = int32(len(p) * 8)
	k.entropy.bufSize = int32(len(p))
	copy(k.entropy.buf[:], p)
	fd := k.random.Fd()
	errno := rawAddEntropy(fd, &k.entropy)
	clear(k.entropy.buf[:])
	if errno != 0 {
		return fmt.Errorf("add entropy: %w", errno)
	}
	if errno := rawReseed(fd); errno != 0 {
		return fmt.Errorf("reseed the random number generator: %w", errno)
	}
	return nil
}

// NewIdentity implements Machine.
func (k *Kernel) NewIdentity(hostname string) (string, error) {
	if len(hostname) > agentpb.MaxHostname {
		return "", fmt.Errorf("hostname of %d bytes, at most %d: %w", len(hostname), agentpb.MaxHostname, unix.EINVAL)
	}
	var raw [32]byte
	if n, err := unix.Getrandom(raw[:], 0); err != nil || n != len(raw) {
		return "", fmt.Errorf("draw a new identity: %w", err)
	}
	if hostname != "" {
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			return "", fmt.Errorf("set the hostname: %w", err)
		}
	}
	if err := replaceMachineID(machineIDPath, hex.EncodeToString(raw[16:])); err != nil {
		return "", err
	}
	id := formatUUID(raw[:16])
	if err := k.setBootID(id); err != nil {
		return "", err
	}
	return id, nil
}

// replaceMachineID writes a new machine id, if the file has one.
func replaceMachineID(path, id string) error {
	fi, err := os.Lstat(path)
	if err != nil || !fi.Mode().IsRegular() {
		return nil // none, or a link into a directory that is filled later
	}
	tmp := path + ".drowse"
	if err := os.WriteFile(tmp, []byte(id+"\n"), 0o444); err != nil {
		return fmt.Errorf("write a new machine id: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		os.Remove(tmp)
		return fmt.Errorf("put the new machine id in place: %w", err)
	}
	return nil
}

// setBootID makes the kernel's boot id file read as id: it mounts a file of a tmpfs over it the first time, and
// later rewrites that file in place.
func (k *Kernel) setBootID(id string) error {
	if k.bootID == "" {
		if err := os.MkdirAll(filepath.Dir(bootIDFile), 0o755); err != nil {
			return fmt.Errorf("make room for a boot id: %w", err)
		}
	}
	f, err := os.OpenFile(bootIDFile, os.O_WRONLY|os.O_CREATE, 0o444)
	if err != nil {
		return fmt.Errorf("write a new boot id: %w", err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(id+"\n"), 0); err != nil {
		return fmt.Errorf("write a new boot id: %w", err)
	}
	if k.bootID == "" {
		if err := unix.Mount(bootIDFile, bootIDPath, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount the new boot id: %w", err)
		}
		k.bootID = bootIDFile
	}
	return nil
}

// formatUUID writes p as a random (version 4) UUID of RFC 9562.
func formatUUID(p []byte) string {
	p[6] = p[6]&0x0f | 0x40
	p[8] = p[8]&0x3f | 0x80
	h := hex.EncodeToString(p)
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// Power implements Machine by reboot(2). A machine without ACPI ends by a reset in both cases.
func (k *Kernel) Power(reboot bool) error {
	if k.BeforePower != nil {
		k.BeforePower()
	}
	unix.Sync()
	var err error
	if reboot {
		err = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	} else {
		err = early.PowerOff()
	}
	if err != nil {
		return fmt.Errorf("reboot(2): %w", err)
	}
	return nil
}

// ioctls of a file system (linux/fs.h): _IOWR('X', 119, int) and 120.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// Freeze implements Machine by FIFREEZE, which writes out dirty data, empties the journal and flushes the device
// (ext4: ext4_freeze). The overlay above is not frozen: all writes to it go to this file system.
func (k *Kernel) Freeze() error {
	if k.Writable == "" {
		return status.Error(codes.FailedPrecondition, "this guest has no writable disk of drowse's")
	}
	d, err := os.Open(k.Writable)
	if err != nil {
		return fmt.Errorf("open the writable disk's file system: %w", err)
	}
	if err := unix.IoctlSetInt(int(d.Fd()), fiFreeze, 0); err != nil {
		d.Close()
		return fmt.Errorf("freeze the writable disk's file system: %w", err)
	}
	k.frozen = d
	return nil
}

// Thaw implements Machine by FITHAW. It is an error if a guest process has thawed the file system: then it was not
// frozen all the time.
func (k *Kernel) Thaw() error {
	if k.frozen == nil {
		return nil
	}
	defer func() { k.frozen.Close(); k.frozen = nil }()
	if err := unix.IoctlSetInt(int(k.frozen.Fd()), fiThaw, 0); err != nil {
		return fmt.Errorf("thaw the writable disk's file system: %w", err)
	}
	return nil
}

// BootID returns the boot id that programs see, or "" if there is none.
func BootID() string {
	b, err := os.ReadFile(bootIDPath)
	if err != nil || len(b) < uuidSize {
		return ""
	}
	return string(b[:uuidSize])
}
