package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox/jail/confine"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake makes the files of a host.
func fake(t *testing.T, files map[string]string) host {
	t.Helper()
	h := host{root: t.TempDir()}
	for name, text := range files {
		p := h.path(name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func find(t *testing.T, checks []Check, name string) Check {
	t.Helper()
	for _, c := range checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %s among %d", name, len(checks))
	return Check{}
}

// files lists everything below a directory.
func files(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		out = append(out, p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestExamine_this_host_leaves_nothing_behind(t *testing.T) {
	dir := t.TempDir()
	before := files(t, dir)
	r, err := Examine(t.Context(), Options{StateDir: filepath.Join(dir, "not", "there"), Agent: filepath.Join(dir, "agent"), VMM: filepath.Join(dir, "agent")})
	if err != nil {
		t.Fatal(err)
	}
	if after := files(t, dir); len(after) != len(before) {
		t.Errorf("left behind: %q", after)
	}
	if r.CanRun {
		t.Error("VMs can run without an agent, it says")
	}
	names := map[string]bool{}
	for _, c := range r.Checks {
		switch c.Status {
		case OK, Missing, Degraded, Unknown:
		default:
			t.Errorf("check %s has status %q", c.Name, c.Status)
		}
		if names[c.Name] {
			t.Errorf("check %s is there twice", c.Name)
		}
		names[c.Name] = true
		if c.Status == OK && c.Consequence != "" {
			t.Errorf("check %s is ok and yet has the consequence %q", c.Name, c.Consequence)
		}
		if (c.Status == Missing || c.Status == Degraded) && c.Consequence == "" {
			t.Errorf("check %s is %s without a consequence", c.Name, c.Status)
		}
		if strings.ContainsAny(c.Detail+c.Consequence, "\n\t") {
			t.Errorf("check %s has more than a line: %q", c.Name, c.Detail+c.Consequence)
		}
	}
	for _, name := range []string{"kvm", "userfaultfd", "memory", "cgroup", "tun", "bpf", "tcx", "bpffs", "seccomp", "landlock", "cgroup_memory", "network_process", "space", "punch_hole", "reflink", "mkfs_ext4", "mmdebstrap", "kernel_build", "agent", "kernels", "images"} {
		if !names[name] {
			t.Errorf("no check %s", name)
		}
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

func TestJail_says_what_is_weaker_without_a_wall(t *testing.T) {
	walls := confine.Probe()
	for i := range walls {
		walls[i].Present = false
	}
	var g group
	jail(&g, walls)
	if g.checks[0].Name != "seccomp_filter" || g.checks[0].Status != OK {
		t.Errorf("%+v", g.checks[0])
	}
	g.checks = g.checks[1:]
	if len(g.checks) != len(walls) || len(walls) == 0 {
		t.Fatalf("%d checks of %d walls", len(g.checks), len(walls))
	}
	for i, c := range g.checks {
		if c.Status != Missing || c.Consequence == "" || c.Required || strings.ContainsAny(c.Name, " :") {
			t.Errorf("without %s: %+v", walls[i].Name, c)
		}
		if strings.Contains(c.Consequence, "unconfined") != walls[i].Required {
			t.Errorf("without %s, which is required: %t, it says %q", walls[i].Name, walls[i].Required, c.Consequence)
		}
	}
}

func TestJail_says_that_the_filter_only_logs(t *testing.T) {
	t.Setenv(seccompEnv, "log")
	var g group
	jail(&g, nil)
	if c := g.checks[0]; c.Status != Degraded || !strings.Contains(c.Consequence, "not confined") {
		t.Errorf("%+v", c)
	}
}

func TestExamine_ends_with_its_context(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Examine(ctx, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of the context", err)
	}
}

func TestKVM_of_hosts_without_it(t *testing.T) {
	tests := []struct {
		name  string
		files map[string]string
		want  Kind
	}{
		{"no device node", nil, NoKVM},
		{"a file in its place", map[string]string{"dev/kvm": ""}, NoKVM},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var g group
			k := fake(t, tt.files).kvm(&g)
			if k.Kind != tt.want {
				t.Errorf("kind %s, want %s", k.Kind, tt.want)
			}
			if c := find(t, g.checks, "kvm"); c.Status != Missing || !c.Required {
				t.Errorf("check %+v, want that it is required and missing", c)
			}
			if canRun(g.checks) {
				t.Error("VMs can run, it says")
			}
		})
	}
}

func TestVendorModule(t *testing.T) {
	const amd = "processor\t: 0\nflags\t\t: fpu svm hypervisor\n"
	tests := []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"the holder of kvm", map[string]string{"sys/module/kvm/holders/kvm_intel": "", "sys/module/kvm_intel/x": ""}, "kvm_intel"},
		{"a module without holders", map[string]string{"sys/module/kvm_amd/x": ""}, "kvm_amd"},
		{"another vendor", map[string]string{"sys/module/kvm_pvm/x": ""}, "kvm_pvm"},
		{"both built in, AMD's CPU", map[string]string{"sys/module/kvm_amd/x": "", "sys/module/kvm_intel/x": "", "proc/cpuinfo": amd}, "kvm_amd"},
		{"both built in, Intel's CPU", map[string]string{"sys/module/kvm_amd/x": "", "sys/module/kvm_intel/x": ""}, "kvm_intel"},
		{"none", nil, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := fake(t, tt.files).vendorModule(); got != tt.want {
				t.Errorf("module %q, want %q", got, tt.want)
			}
		})
	}
}

func TestMemory_and_system_facts(t *testing.T) {
	const (
		plenty = "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\nHugePages_Total: 3\n"
		little = "MemTotal: 8000000 kB\nMemAvailable: 100000 kB\n"
	)
	tests := []struct {
		name, check string
		files       map[string]string
		want        Status
		says        string
	}{
		{"enough memory", "memory", map[string]string{"proc/meminfo": plenty}, OK, "3.8 GiB available of 7.6 GiB"},
		{"little memory", "memory", map[string]string{"proc/meminfo": little}, Degraded, "98 MiB available"},
		{"no proc", "memory", nil, Unknown, "cannot be read"},
		{"reserved huge pages", "hugepages", map[string]string{"proc/meminfo": plenty}, OK, "3 reserved"},
		{"strict overcommit", "overcommit", map[string]string{"proc/sys/vm/overcommit_memory": "2\n"}, Degraded, "=2"},
		{"huge pages always", "transparent_hugepages", map[string]string{"sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n"}, OK, "always"},
		{"huge pages never", "transparent_hugepages", map[string]string{"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}, Degraded, "never"},
		{"no cgroups", "cgroup", nil, Missing, "no cgroup"},
		{"cgroups version 2", "cgroup", map[string]string{"proc/self/mounts": "c /sys/fs/cgroup cgroup2 rw 0 0\n"}, OK, "version 2 at /sys/fs/cgroup"},
		{"cgroups of both versions", "cgroup", map[string]string{"proc/self/mounts": "c /a cgroup rw 0 0\nc /b cgroup2 rw 0 0\n"}, OK, "version 1, 1 hierarchies, and version 2 at /b"},
		{"slow clock", "clock", map[string]string{"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"}, Degraded, "hpet"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := fake(t, tt.files)
			var g group
			h.memory(&g)
			h.system(&g)
			c := find(t, g.checks, tt.check)
			if c.Status != tt.want || !strings.Contains(c.Detail, tt.says) {
				t.Errorf("check %+v, want %s and %q", c, tt.want, tt.says)
			}
		})
	}
}

func TestStateDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	// hooked is one with a hook on the host.
	hooked := func(name string, mode os.FileMode) string {
		dir := filepath.Join(t.TempDir(), "store")
		path := filepath.Join(dir, "hooks.d", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	tests := []struct {
		name, dir, check string
		want             Status
		says             string
	}{
		{"without hooks on the host", t.TempDir(), "hooks.d", OK, "no hooks on the host"},
		{"with one", hooked("10-x", 0o755), "hooks.d", OK, "10-x"},
		{"with one that others may write", hooked("10-x", 0o757), "hooks.d", Degraded, "10-x: it is not run: others may write to it"},
		{"with one that is not executable", hooked("10-x", 0o644), "hooks.d", Degraded, "no hooks on the host"},
		{"one that is there", t.TempDir(), "state_dir", OK, ""},
		{"one that will be made", filepath.Join(t.TempDir(), "a", "b"), "state_dir", OK, "not there yet"},
		{"a file in its place", file, "state_dir", Missing, "not a directory"},
		{"below a file", filepath.Join(file, "x"), "state_dir", Missing, "not a directory"},
		{"a path too long for sockets", filepath.Join(t.TempDir(), strings.Repeat("x", 90)), "socket_path", Degraded, "107 are possible"},
		{"no file can be made", "/proc", "punch_hole", Unknown, "/proc"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var g group
			host{root: "/"}.state(&g, tt.dir)
			c := find(t, g.checks, tt.check)
			if c.Status != tt.want || !strings.Contains(c.Detail, tt.says) {
				t.Errorf("check %+v, want %s and %q", c, tt.want, tt.says)
			}
		})
	}
}

func TestAgent_and_program_of_a_VM_are_required(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]Status{file: OK, file + "2": Missing, filepath.Dir(file): Missing, "": Unknown} {
		var g group
		stores(&g, Options{Agent: path, VMM: path, StateDir: t.TempDir()})
		for _, name := range []string{"agent", "vmm"} {
			if c := find(t, g.checks, name); c.Status != want || !c.Required {
				t.Errorf("%s %q: check %+v, want %s, required", name, path, c, want)
			}
		}
	}
}

func TestKernelRelease(t *testing.T) {
	for release, want := range map[string][2]int{"6.1.0-56-amd64": {6, 1}, "6.18.44": {6, 18}, "5.10-rc1": {5, 10}, "6": {0, 0}, "": {0, 0}, "x.y": {0, 0}} {
		if major, minor := version(release); [2]int{major, minor} != want {
			t.Errorf("release %q is %d.%d, want %d.%d", release, major, minor, want[0], want[1])
		}
	}
}

func TestPrograms_of_a_user_are_loaded_by_a_helper_that_he_may_use(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, helper string
		err          error
		want         Status
		says         string
	}{
		{"a helper", socket, unix.EPERM, OK, socket},
		{"no helper", socket + "-none", unix.EPERM, Unknown, "drowse net helper"},
		{"a kernel without eBPF", socket, unix.ENOSYS, Missing, "not implemented"},
	} {
		if got, detail := without(tt.err, tt.helper); got != tt.want || !strings.Contains(detail, tt.says) {
			t.Errorf("%s: %s, %q, want %s and %q", tt.name, got, detail, tt.want, tt.says)
		}
	}
}
