package tap

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// isolate gives the test a network namespace of its own, so that nothing it does
// reaches the host.
func isolate(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making TAP devices needs root")
	}
	if _, err := os.Stat(clone); err != nil {
		t.Skipf("the host has no TAP devices: %v", err)
	}
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	ns, err := netns.New()
	if err != nil {
		t.Skipf("the host does not allow network namespaces: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestCreated_device_is_down_and_vanishes_on_close(t *testing.T) {
	isolate(t)
	d, err := Create("drowse0")
	must(t, err)
	if d.Name() != "drowse0" {
		t.Errorf("name %q", d.Name())
	}
	flags := func() net.Flags {
		link, err := netlink.LinkByName("drowse0")
		must(t, err)
		return link.Attrs().Flags
	}
	if flags()&net.FlagUp != 0 {
		t.Error("it is up")
	}
	must(t, d.Up())
	if flags()&net.FlagUp == 0 {
		t.Error("it is down")
	}
	must(t, d.SetOffloads(unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6|unix.TUN_F_TSO_ECN))
	must(t, d.Close())
	must(t, d.Close())
	if _, err := netlink.LinkByName("drowse0"); err == nil {
		t.Error("the interface is still there")
	}
}

func TestCreate_refuses_bad_and_taken_names(t *testing.T) {
	isolate(t)
	d, err := Create("taken")
	must(t, err)
	defer d.Close()
	for name, want := range map[string]error{
		"":                 ErrName,
		".":                ErrName,
		"..":               ErrName,
		"sixteen-bytes-xx": ErrName,
		"a/b":              ErrName,
		"a b":              ErrName,
		"a:b":              ErrName,
		"a%s":              ErrName,
		"a%d":              ErrName,
		"taken":            ErrExists,
		"lo":               ErrExists,
	} {
		d, err := Create(name)
		if !errors.Is(err, want) {
			t.Errorf("Create(%q): got %v, want %v", name, err, want)
		}
		if d != nil {
			d.Close()
		}
	}
	if d, err := Create("fifteen-bytes-x"); err != nil {
		t.Errorf("a name of 15 bytes: %v", err)
	} else {
		d.Close()
	}
}

func TestWithout_permission_the_error_says_so(t *testing.T) {
	if os.Getenv("TAP_TEST_UNPRIVILEGED") != "" {
		_, err := Create("denied")
		fmt.Printf("permission=%v err=%v\n", errors.Is(err, os.ErrPermission), err)
		return
	}
	isolate(t)
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestWithout_permission_the_error_says_so$")
	cmd.Env = append(os.Environ(), "TAP_TEST_UNPRIVILEGED=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Skipf("the test binary cannot run as another user: %v: %s", err, out)
	}
	if !strings.Contains(string(out), "permission=true") || !strings.Contains(string(out), "CAP_NET_ADMIN") {
		t.Errorf("output %s", out)
	}
}

func TestDevice_vanishes_with_a_killed_process(t *testing.T) {
	if os.Getenv("TAP_TEST_HOLD") != "" {
		_, err := Create("held")
		fmt.Println("created", err)
		time.Sleep(time.Minute)
		return
	}
	isolate(t)
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestDevice_vanishes_with_a_killed_process$")
	cmd.Env = append(os.Environ(), "TAP_TEST_HOLD=1")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line := make([]byte, 64)
	n, err := out.Read(line)
	must(t, err)
	if _, err := net.InterfaceByName("held"); err != nil {
		t.Errorf("%s: %v", line[:n], err)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	if _, err := net.InterfaceByName("held"); err == nil {
		t.Error("the interface has outlived its process")
	}
}

// A confined process with shares may change the mode and owner of files, and gets the descriptor of its TAP device.
func TestAttack_descriptor_of_a_device_changes_the_file_in_dev(t *testing.T) {
	isolate(t)
	d, err := Create("drwtest0")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var st unix.Stat_t
	if err := unix.Fstat(d.FD(), &st); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"mode":  unix.Fchmod(d.FD(), st.Mode&0o777), // the present ones
		"owner": unix.Fchownat(d.FD(), "", int(st.Uid), int(st.Gid), unix.AT_EMPTY_PATH),
		"times": unix.UtimesNanoAt(d.FD(), "", nil, unix.AT_EMPTY_PATH),
	} {
		if !errors.Is(err, unix.EROFS) {
			t.Errorf("changing its %s: %v", what, err)
		}
	}
}
