package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// GrowRaw grows a raw file with an ext4, and its file system, to size bytes. It first checks the file system and
// replays its journal, as after a crash. If the file system needs more repair than that, GrowRaw fails with
// ErrDamaged. It syncs nothing. If it fails or is killed, the file is unusable: pass it a copy.
//
// A guest may have written anything to the file. So GrowRaw runs e2fsck(8) and resize2fs(8) as the unprivileged
// growUser if this process is root, gives them only the file, and bounds their time, memory and output. As root,
// it makes growUser the owner of the file meanwhile.
func GrowRaw(ctx context.Context, raw string, size int64) (err error) {
	if err := checkSize(size); err != nil {
		return fmt.Errorf("grow ext4: %w", err)
	}
	f, err := os.OpenFile(raw, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("grow ext4: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if st, err := f.Stat(); err != nil {
		return fmt.Errorf("grow ext4: %w", err)
	} else if st.Size() > size {
		return fmt.Errorf("grow ext4: %w: %s has %d bytes, more than %d", ErrSize, raw, st.Size(), size)
	}
	if os.Geteuid() == 0 {
		if err := f.Chown(growUser, growUser); err != nil {
			return fmt.Errorf("grow ext4: %w", err)
		}
		defer func() { err = errors.Join(err, f.Chown(0, os.Getegid())) }()
	}
	// resize2fs requires a check since the last mount. -p repairs only what is safe to repair without asking.
	out, code, err := runE2fs(ctx, f, "e2fsck", "-f", "-p")
	switch {
	case code > fsckRepaired:
		return fmt.Errorf("grow ext4: %w: %w: %s", ErrDamaged, err, out)
	case code < 0: // e2fsck did not run, or was killed
		return fmt.Errorf("grow ext4: %w: %s", err, out)
	}
	if err := f.Truncate(size); err != nil {
		return fmt.Errorf("grow ext4: %w", err)
	}
	if out, _, err := runE2fs(ctx, f, "resize2fs"); err != nil {
		return fmt.Errorf("grow ext4: %w: %s", err, out)
	}
	return nil
}

const (
	// fsckRepaired is the highest exit status of e2fsck(8) that means success: it corrected errors.
	fsckRepaired = 1
	// growUser is the user nobody, the kernel's overflow UID.
	growUser = 65534
	// Limits of the programs. For a file system of 1 TiB e2fsck takes some 100 MiB.
	growMemory  = 4 << 30 // bytes of address space
	growSeconds = 3600    // of processor time
	growOutput  = 16 << 10
)

// head keeps the first growOutput bytes that are written to it.
type head struct{ bytes.Buffer }

func (h *head) Write(p []byte) (int, error) {
	h.Buffer.Write(p[:min(len(p), growOutput-h.Len())])
	return len(p), nil
}

// runE2fs runs a program of e2fsprogs on a file. It returns the beginning of its output and its exit status, -1 if
// it has none.
func runE2fs(ctx context.Context, f *os.File, name string, args ...string) (out string, code int, err error) {
	tool, err := findTool("grow ext4", []string{name, "/usr/sbin/" + name, "/sbin/" + name})
	if err != nil {
		return "", -1, err
	}
	var h head
	// The shell sets the limits, and the program inherits them. The path /proc/self/fd/3 is the inherited file, so
	// the program need not have access to its directories.
	script := fmt.Sprintf(`ulimit -v %d && ulimit -t %d && exec "$0" "$@"`, growMemory>>10, growSeconds)
	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", script, tool}, append(args, "/proc/self/fd/3")...)...)
	cmd.Env = []string{"LC_ALL=C", "E2FSCK_CONFIG=/dev/null"}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = &h, &h, []*os.File{f}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Credential: &syscall.Credential{Uid: growUser, Gid: growUser},
			Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWIPC,
		}
	}
	err = cmd.Run()
	if cmd.ProcessState == nil {
		return "", -1, fmt.Errorf("%s: %w", tool, err)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", tool, err)
	}
	if cause := ctx.Err(); cause != nil {
		return h.String(), -1, errors.Join(cause, err)
	}
	return h.String(), cmd.ProcessState.ExitCode(), err
}
