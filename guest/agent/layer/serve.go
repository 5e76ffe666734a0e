package layer

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agent/upper"
)

// bufBytes is the size of one write.
const bufBytes = 32 << 10

// Serve brings the machine to rest and writes its layer to w. It needs root, in a VM whose PID 1 is the agent.
func Serve(w io.Writer) error {
	if err := endOthers(); err != nil {
		return err
	}
	if err := unmountOthers(); err != nil {
		return err
	}
	for _, dir := range []string{"/run", "/dev/shm"} {
		if err := empty(dir); err != nil {
			return err
		}
	}
	dir, done, err := upper.OpenWritten()
	if err != nil {
		return err
	}
	defer done()
	b := bufio.NewWriterSize(w, bufBytes)
	if err := Pack(b, dir); err != nil {
		return err
	}
	return b.Flush()
}

// Limits of bringing the machine to rest.
const (
	restPatience = 30 * time.Second
	restPoll     = 20 * time.Millisecond
	maxMounts    = 1 << 20 // bytes of mountinfo
)

// endOthers kills all processes but the agent and this one, and waits until they are gone.
func endOthers() error {
	for deadline := time.Now().Add(restPatience); ; time.Sleep(restPoll) {
		// kill(2): all processes except PID 1 and the caller.
		if err := unix.Kill(-1, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("end the processes that are left: %w", err)
		}
		left, err := others()
		if err != nil {
			return fmt.Errorf("end the processes that are left: %w", err)
		}
		if left == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("end the processes that are left: %d do not end within %v", left, restPatience)
		}
	}
}

// others counts the processes besides PID 1 and this one. Kernel threads and ended processes have no program.
func others() (int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	n := 0
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == 1 || pid == os.Getpid() {
			continue
		}
		if _, err := os.Readlink("/proc/" + e.Name() + "/exe"); err == nil {
			n++
		}
	}
	return n, nil
}

// own are the mounts of the machine itself.
var own = []string{"/", "/dev", "/dev/pts", "/dev/shm", "/proc", "/run", "/sys", "/sys/fs/cgroup"}

// unmountOthers unmounts what commands have mounted, the newest first.
func unmountOthers() error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("unmount what is left: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxMounts))
	f.Close()
	if err != nil {
		return fmt.Errorf("unmount what is left: %w", err)
	}
	for _, dir := range foreignMounts(string(text)) {
		if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s, which is left: %w", dir, err)
		}
	}
	return nil
}

// foreignMounts returns the mount points of a mountinfo (proc(5)) that are not the machine's own, or that cover
// one of its own.
func foreignMounts(text string) []string {
	var out []string
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		dir := unescape(f[4])
		if slices.Contains(own, dir) && !seen[dir] {
			seen[dir] = true
			continue
		}
		out = append(out, dir)
	}
	slices.Reverse(out)
	return out
}

// unescape decodes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// empty removes the contents of a directory that is in memory alone, except the agent's own.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("empty %s: %w", dir, err)
	}
	for _, e := range entries {
		if dir == "/run" && e.Name() == "drowse" {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("empty %s: %w", dir, err)
		}
	}
	return nil
}
