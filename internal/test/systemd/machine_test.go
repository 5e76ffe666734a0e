//go:build workloads

package systemd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/hwkvm"
)

// packages are those of a server, and what the test needs itself.
const packages = "systemd,systemd-sysv,dbus,dbus-user-session,udev,libpam-systemd,iproute2,nftables,e2fsprogs,kmod,adduser," +
	"linux-image-amd64,initramfs-tools,openssh-server,procps,curl,python3"

// Users of the machine. All have the test's key.
const (
	root     = "root"
	member   = "dev" // who gets into group kvm
	attacker = "eve" // in group kvm from the beginning
	stranger = "mallory"
)

// commandLimit bounds one command. A guest boots in half a minute on an emulated processor that has one of its own.
const commandLimit = 15 * time.Minute

// machine is a Debian.
type machine struct {
	t    *testing.T
	dir  string // with its disk, its kernel and the key
	port string // of its SSH
	qemu *exec.Cmd
	done chan struct{}
}

// run runs a program of this host.
func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// debian returns a tar archive of a root file system, made once for these packages.
func debian(t *testing.T) string {
	t.Helper()
	cache, err := hwkvm.DefaultCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(packages))
	path := filepath.Join(cache, "systemd-"+hex.EncodeToString(sum[:8])+".tar")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		t.Fatal(err)
	}
	run(t, "mmdebstrap", "--quiet", "--variant=minbase", "--include="+packages, "bookworm", path+".new.tar")
	if err := os.Rename(path+".new.tar", path); err != nil {
		t.Fatal(err)
	}
	return path
}

// newMachine makes a Debian with drowse's programs in /usr/local/bin, a checkout's contrib in /root, and kernels and
// images in /opt/seed.
func newMachine(t *testing.T) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("makes a root file system: needs root")
	}
	state := os.Getenv("DROWSE_TEST_STATE")
	if state == "" {
		t.Fatal("set DROWSE_TEST_STATE to a state directory with a kernel and the image debian-python: `make test-systemd` does")
	}
	top, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, dir: t.TempDir()}
	tree := filepath.Join(m.dir, "root")
	key := filepath.Join(m.dir, "key")
	run(t, "mkdir", tree)
	run(t, "tar", "-C", tree, "--numeric-owner", "-xpf", debian(t))
	run(t, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
	for path, text := range map[string]string{
		"etc/hostname":                       "judge\n",
		"etc/hosts":                          "127.0.0.1 localhost judge\n",
		"etc/resolv.conf":                    "nameserver 10.0.2.3\n",
		"etc/fstab":                          "/dev/vda / ext4 defaults 0 1\n",
		"etc/systemd/network/eth.network":    "[Match]\nType=ether\nName=en* eth*\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n",
		"etc/ssh/sshd_config.d/judge.conf":   "UseDNS no\n",
		"etc/systemd/journald.conf.d/j.conf": "[Journal]\nStorage=persistent\n",
	} {
		path = filepath.Join(tree, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	script := `set -eu
cd "$1"
for u in dev eve mallory; do chroot . useradd -m -s /bin/bash $u; done
chroot . adduser --quiet eve kvm
for h in root home/dev home/eve home/mallory; do
	mkdir -p $h/.ssh; cp "$2.pub" $h/.ssh/authorized_keys; chmod 700 $h/.ssh; chown -R --reference=$h $h/.ssh
done
chroot . systemctl --quiet enable systemd-networkd ssh
chroot . systemctl --quiet mask systemd-networkd-wait-online.service apt-daily.timer apt-daily-upgrade.timer
install -m 755 "$3"/bin/drowse "$3"/bin/drowse-vmm "$3"/bin/drowse-agent usr/local/bin
cp -r "$3"/contrib root
mkdir opt/seed
cp -a --sparse=always "$4"/kernels "$4"/images opt/seed
chmod -R a+rX opt/seed
cp boot/vmlinuz-* ../vmlinuz
cp boot/initrd.img-* ../initrd
truncate -s 12G ../disk
mke2fs -q -t ext4 -d . ../disk
cd ..
rm -r root`
	run(t, "sh", "-c", script, "sh", tree, key, top, state)
	m.boot()
	t.Cleanup(func() {
		m.qemu.Process.Kill()
		<-m.done
	})
	return m
}

// boot starts the machine and waits until root can log in.
func (m *machine) boot() {
	m.t.Helper()
	qemu, err := hwkvm.FindQEMU()
	if err != nil {
		m.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		m.t.Fatal(err)
	}
	_, m.port, _ = net.SplitHostPort(ln.Addr().String())
	ln.Close()
	in := func(name string) string { return filepath.Join(m.dir, name) }
	// Two processors of QEMU may lose a timer's interrupt: see package hwkvm.
	m.qemu = exec.Command(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", "q35", "-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max,+svm,+npt", "-smp", "2", "-m", "4096",
		"-kernel", in("vmlinuz"), "-initrd", in("initrd"),
		"-append", "root=/dev/vda rw console=ttyS0 mitigations=off tsc=reliable no_timer_check random.trust_cpu=on",
		"-drive", "file="+in("disk")+",format=raw,if=virtio,cache=unsafe", "-serial", "file:"+in("console"),
		"-netdev", "user,id=n,hostfwd=tcp:127.0.0.1:"+m.port+"-:22", "-device", "virtio-net-pci,netdev=n", "-device", "virtio-rng-pci")
	m.qemu.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	var said bytes.Buffer
	m.qemu.Stderr = &said
	if err := m.qemu.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.done = make(chan struct{})
	go func() { defer close(m.done); _ = m.qemu.Wait() }()
	for begin := time.Now(); ; time.Sleep(time.Second) {
		if _, err := m.try(root, "true"); err == nil {
			return
		}
		select {
		case <-m.done:
			m.t.Fatalf("QEMU has ended: %s", said.String())
		default:
		}
		if time.Since(begin) > commandLimit {
			console, _ := os.ReadFile(in("console"))
			m.t.Fatalf("nobody can log in:\n%s", console[max(0, len(console)-4000):])
		}
	}
}

// try runs a script in a session of a user, and returns what it prints on both streams.
func (m *machine) try(user, script string) (string, error) {
	ctx, cancel := context.WithTimeout(m.t.Context(), commandLimit)
	defer cancel()
	c := exec.CommandContext(ctx, "ssh", "-q", "-i", filepath.Join(m.dir, "key"), "-p", m.port, "-o", "StrictHostKeyChecking=no",
		"-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "-o", "ConnectTimeout=60", user+"@127.0.0.1", "bash -s")
	c.Stdin = strings.NewReader("export DROWSE_STATE=~/.local/state/drowse; [ $UID != 0 ] || unset DROWSE_STATE\nexec 2>&1\nset -e\n" + script + "\n")
	out, err := c.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %q: %w", user, script, err)
	}
	return strings.TrimSpace(string(out)), err
}

// does fails the test if a script fails, or does not print all of the wanted words.
func (m *machine) does(t *testing.T, user, script string, want ...string) string {
	t.Helper()
	begin := time.Now()
	out, err := m.try(user, script)
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("%s: %q does not say %q:\n%s", user, script, w, out)
		}
	}
	t.Logf("%s, %.0f s: %s\n%s", user, time.Since(begin).Seconds(), script, out)
	return out
}

// fails wants a script to fail, with these words.
func (m *machine) fails(t *testing.T, user, script string, want ...string) {
	t.Helper()
	out, err := m.try(user, script)
	if err == nil {
		t.Errorf("%s: %q is done:\n%s", user, script, out)
	}
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("%s: %q does not say %q:\n%s", user, script, w, out)
		}
	}
	t.Logf("%s: %s\n%s", user, script, out)
}
