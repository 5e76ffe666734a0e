//go:build workloads

package systemd

import (
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// api is a client of the service's socket, as in docs/guides/api.md.
const api = `api() { curl -sS --fail-with-body --unix-socket /var/lib/drowse/api.sock -H 'Content-Type: application/json' "$@"; }
`

// cgroups prints the limits of all confined processes.
const cgroups = `for p in $(pgrep -f 'self/exe jailed'); do
	d=/sys/fs/cgroup$(cut -d: -f3 /proc/$p/cgroup) || continue
	echo $d memory=$(cat $d/memory.max) pids=$(cat $d/pids.max) cpu=$(cat $d/cpu.max 2>/dev/null) io=$(cat $d/io.max 2>/dev/null)
done
`

// busy gives a VM a file and a process, and still says whether both are there.
func busy(vm, mark string) string {
	return fmt.Sprintf("drowse exec %s sh -c 'echo %s >/root/f; setsid sleep %s >/dev/null 2>&1 </dev/null &'", vm, mark, mark)
}

func still(vm, mark string) string {
	return fmt.Sprintf(`test "$(drowse exec %s sh -c 'cat /root/f; tr "\0" " " </proc/$(cat /proc/[0-9]*/stat | grep -F "(sleep)" | cut -d" " -f1)/cmdline')" = "%s
sleep %s "`, vm, mark, mark)
}

// connects has a guest try the test's two ports.
const connects = `python3 -c '
import socket
for port in %s, %s:
	s = socket.socket(); s.settimeout(8)
	try: s.connect(("10.0.2.2", port)); print(s.recv(9).decode())
	except OSError: print("no", port)
'`

// greet answers each connection with a word.
func greet(t *testing.T, word string) (port string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, word)
			c.Close()
		}
	}()
	_, port, _ = net.SplitHostPort(ln.Addr().String())
	return port
}

func TestUnits_hold_on_Debian(t *testing.T) {
	m := newMachine(t)
	step := func(name string, f func(t *testing.T)) {
		if !t.Run(name, f) {
			out, _ := m.try(root, "journalctl -b --no-pager -u 'drowse*' | tail -40")
			t.Logf("%s", out)
		}
	}

	step("the service starts, and its socket answers", func(t *testing.T) {
		m.does(t, root, `cp contrib/systemd/* /etc/systemd/system/
systemctl enable --now drowse.socket drowse.service
systemctl is-active drowse.service drowse.socket drowse-sleep-all.service
systemd-analyze verify /etc/systemd/system/drowse*
cp -a --sparse=always /opt/seed/* /var/lib/drowse`)
		m.does(t, root, "drowse doctor | grep -A1 -E 'kvm|cgroup_'", "hardware-svm")
		m.does(t, root, api+`api http://drowse/v1/sandboxes -d '{"spec":{"name":"a","image":"debian-python","memory_mib":256}}'
`+busy("a", "7001")+`
api http://drowse/v1/sandboxes/a/sleep -X POST
api http://drowse/v1/sandboxes/a/wake -X POST
api http://drowse/v1/sandboxes/a/exec -d '{"command":["true"]}'`, `"exit_code":0`)
		m.does(t, root, still("a", "7001"))
		m.does(t, root, `mkdir /etc/systemd/system/drowse.service.d
printf '[Service]\nExecStart=\nExecStart=/usr/local/bin/drowse serve --state /var/lib/drowse --on-exit leave --require-jail\n' > /etc/systemd/system/drowse.service.d/jail.conf
systemctl daemon-reload
systemctl restart drowse
drowse ps -o json`, `"confined": true`)
	})

	step("VMs run on without the service, and it comes back", func(t *testing.T) {
		pid := "$(systemctl show -p MainPID --value drowse)"
		for _, how := range []string{
			"systemctl stop drowse; systemctl start drowse",
			"systemctl restart drowse",
			"kill -9 " + pid,
			"install /usr/local/bin/drowse /root/new; mv /root/new /usr/local/bin/drowse; systemctl restart drowse",
			// The watchdog sees to it.
			"kill -STOP " + pid,
		} {
			m.does(t, root, "before="+pid+"; "+how+`
until p=`+pid+`; [ $p != 0 ] && [ $p != $before ] && systemctl -q is-active drowse; do sleep 1; done
`+still("a", "7001"))
		}
		// One that the kernel kills for memory takes no other along.
		m.does(t, root, "before="+pid+`
a=$(drowse ps -o json | sed -n 's/ *"pid": \([0-9]*\),/\1/p')
until ahead=$(pgrep -f 'drowse-vmm .*standby' | grep -vx $a); do sleep 1; done
for p in $ahead; do echo 1000 >/proc/$p/oom_score_adj; done
echo f >/proc/sysrq-trigger
until dmesg | grep 'Killed process.*drowse-vmm'; do sleep 1; done
sleep 5
test `+pid+` = $before
`+still("a", "7001"))
		m.does(t, root, "systemctl show -p TasksMax -p ControlGroup drowse", "TasksMax=infinity", "ControlGroup=/drowse.slice/drowse.service")
	})

	step("VMs have cgroups, whose limits stay when systemd reads its units", func(t *testing.T) {
		m.does(t, root, "drowse limits --cpus 0.7 --io-mib 50; drowse sleep a; drowse wake a")
		for _, what := range []string{"", "systemctl daemon-reload", "systemd-run -q --wait -p CPUWeight=50 -p IOWeight=50 true",
			"systemctl daemon-reexec", "systemctl stop drowse; systemctl daemon-reload; systemctl start drowse"} {
			m.does(t, root, what+"\n"+cgroups, "/sys/fs/cgroup/drowse.slice/drowse-", "pids=512 cpu=70000 100000 io=", "wbps=52428800")
		}
		m.does(t, root, "drowse limits --cpus 0 --io-mib 0; drowse sleep a; drowse wake a")
	})

	const own = "mkdir -p -m 700 ~/.local/state && cp -r /opt/seed $DROWSE_STATE && chmod 700 $DROWSE_STATE\n"
	step("who may not use KVM, userfaultfd or the helper is told so", func(t *testing.T) {
		m.fails(t, member, own+"drowse run -d --name none -m 256m debian-python", "no permission to use /dev/kvm")
		m.fails(t, attacker, own+"drowse run -d --name none -m 256m debian-python", "allow access to /dev/userfaultfd")
		m.fails(t, member, "drowse run -d --name tap -m 256m --net open debian-python", "its helper does not answer")
		m.fails(t, stranger, "drowse --state /var/lib/drowse ps", "permission denied")
		m.fails(t, stranger, api+"api http://drowse/v1/sandboxes", "")
	})

	allowed, denied := greet(t, "allowed"), greet(t, "denied")
	try := fmt.Sprintf("drowse exec net "+connects, allowed, denied)
	step("a user of group kvm has VMs with and without a network", func(t *testing.T) {
		m.does(t, root, `cp contrib/systemd/drowse-net.* /etc/systemd/system/
adduser dev kvm
echo 'KERNEL=="userfaultfd", GROUP="kvm", MODE="0660"' > /etc/udev/rules.d/60-userfaultfd.rules
udevadm control --reload && udevadm trigger --settle /dev/userfaultfd
drowse net setup --forward
systemctl enable --now drowse-net.socket`)
		m.does(t, member, "drowse doctor | grep -E 'userfaultfd|bpf '", "allowed by /dev/userfaultfd", "the helper at /run/drowse-net.sock")
		m.does(t, member, "drowse run -d --name none -m 256m debian-python\n"+busy("none", "7002")+"\ndrowse sleep none; drowse wake none\n"+still("none", "7002"))
		m.does(t, member, "drowse run -d --name net -m 256m --net tap --allow 10.0.2.2/32:"+allowed+" debian-python")
		m.does(t, member, try, "allowed", "no "+denied)
		m.does(t, member, "drowse policy flows net", "allow ", "deny ")
		m.does(t, member, "drowse fork net --name fork && drowse rm -f fork && drowse sleep net && drowse wake net\n"+try, "allowed")
		m.fails(t, member, "mkdir -p ~/shared; drowse run -d --name sh -m 256m --share ~/shared:/mnt debian-python", "")
		// Systemd's own socket, for one, would do as root what the helper may not.
		m.does(t, root, "cd /proc/$(systemctl show -p MainPID --value drowse-net)/root/run; ls; test ! -e systemd/private; test ! -e dbus", "drowse")
	})

	step("a network whose helper was killed is back after a sleep", func(t *testing.T) {
		for _, how := range []string{"kill -9 $(systemctl show -p MainPID --value drowse-net)", "systemctl stop drowse-net.service"} {
			m.does(t, root, how)
			m.does(t, member, try, "no "+allowed, "no "+denied)
			m.does(t, member, "drowse sleep net && drowse wake net\n"+try, "allowed", "no "+denied)
		}
	})

	step("who has the helper's socket gets nothing by what he sends", func(t *testing.T) {
		m.fails(t, stranger, attack, "PermissionError")
		m.does(t, attacker, attack, "held 0")
		m.does(t, root, `p=$(systemctl show -p MainPID --value drowse-net); test $(ls /proc/$p/fd | wc -l) -lt 60; systemctl show -p NRestarts drowse-net`)
		m.does(t, member, try, "allowed", "no "+denied)
	})

	step("VMs of a user unit have limits", func(t *testing.T) {
		m.does(t, root, "loginctl enable-linger eve")
		m.does(t, attacker, "drowse limits --cpus 0.7\nsystemd-run --user --scope -q -p Delegate=yes drowse run -d --name unit -m 256m debian-python\n"+busy("unit", "7003"))
		m.does(t, attacker, "systemctl --user daemon-reload\n"+cgroups, "/user@1001.service/app.slice/drowse-u1001-", "pids=512 cpu=70000")
	})

	step("all VMs sleep when the host shuts down, and wake after it has come back", func(t *testing.T) {
		m.does(t, root, api+`api http://drowse/v1/sandboxes -d '{"spec":{"name":"b","image":"debian-python","memory_mib":256}}'
`+busy("b", "7004")+"\n"+still("a", "7001"))
		_, _ = m.try(root, "sync; systemctl poweroff") // the session ends with it
		select {
		case <-m.done:
		case <-time.After(commandLimit):
			t.Fatal("the machine is still on")
		}
		m.boot()
		out := m.does(t, root, "systemctl is-active drowse drowse-sleep-all drowse-net.socket; drowse ps -a")
		out += m.does(t, member, "drowse ps -a") + m.does(t, attacker, "drowse ps -a")
		if n := strings.Count(out, "asleep"); n < 5 || strings.Contains(out, "crashed") || strings.Contains(out, "running") {
			t.Errorf("%d VMs are asleep", n)
		}
		m.does(t, root, still("a", "7001")+"\n"+still("b", "7004"))
		m.does(t, member, still("none", "7002"))
		m.does(t, attacker, still("unit", "7003"))
		m.does(t, root, "drowse net setup --forward")
		m.does(t, member, try, "allowed", "no "+denied)
	})
}

// attack sends garbage, messages that are too large, descriptors, and makes connections that say nothing.
const attack = `python3 - <<'PY'
import array, os, resource, socket, time
def connect():
	s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10); s.connect("/run/drowse-net.sock"); return s
def send(*messages):
	s = connect()
	try:
		for m in messages: s.sendmsg(*m)
		while s.recv(4096): pass
	except OSError as e: print(e)
connect().close()
r, w = os.pipe()
send(([os.urandom(4096)],)); send(([b""],)); send(*[([b"{" * n],) for n in (1 << 16, 200 << 10, 1 << 20, 4 << 20)])
send(*[([b"{}"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [r] * 253))])] * 400)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
all = [connect() for i in range(600)]
held = 600
until = time.time() + 120
while held and time.time() < until:
	time.sleep(1); held = 0
	for s in all:
		s.setblocking(False)
		try: held += len(s.recv(1))
		except BlockingIOError: held += 1
		except OSError: pass
print("held", held)
PY`
