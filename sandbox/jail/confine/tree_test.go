package confine

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOpenTree_takes_writes_only_where_they_are_meant(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can")
	}
	for _, writable := range []bool{false, true} {
		tree, dir, err := OpenTree(t.TempDir(), writable)
		if err != nil {
			t.Fatal(err)
		}
		defer tree.Close()
		defer dir.Close()
		fd, err := unix.Openat(int(dir.Fd()), "new", unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
		if err == nil {
			unix.Close(fd)
		}
		if writable && err != nil || !writable && !errors.Is(err, unix.EROFS) {
			t.Errorf("writable %v: making a file: %v", writable, err)
		}
	}
}
