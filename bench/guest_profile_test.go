package bench

import (
	"testing"
	"time"

	"github.com/drowse-vm/drowse/vmm"
)

// symbols of a kernel, for tests.
var profiledKernel = map[uint64]string{
	1<<63 + 1: "memcpy", 1<<63 + 2: "__x64_sys_read", 1<<63 + 3: "asm_sysvec_apic_timer_interrupt", 1<<63 + 4: "worker_thread",
	1<<63 + 5: "kthread", 1<<63 + 6: "vfs_read",
}

func profileOf(looks ...map[place]time.Duration) *profile {
	return &profile{looks: looks, symbolize: func(addr uint64) (string, uint64, bool) {
		name, ok := profiledKernel[addr]
		return name, 0, ok
	}}
}

func TestProfile_names_the_outermost_entry(t *testing.T) {
	const kernel = 1 << 63
	for name, tt := range map[string]struct {
		s    vmm.Sample
		want string
	}{
		"a program":                    {vmm.Sample{RIP: 0x400000, Stack: []uint64{kernel + 2}}, inProgram},
		"a system call":                {vmm.Sample{RIP: kernel + 1, Stack: []uint64{kernel + 6, kernel + 2, 7}}, "__x64_sys_read"},
		"an interrupt of one":          {vmm.Sample{RIP: kernel + 1, Stack: []uint64{kernel + 3, kernel + 6, kernel + 2}}, "__x64_sys_read"},
		"a thread before its start":    {vmm.Sample{RIP: kernel + 1, Stack: []uint64{kernel + 4, kernel + 5}}, "worker_thread"},
		"a thread without another":     {vmm.Sample{RIP: kernel + 1, Stack: []uint64{kernel + 5}}, "kthread"},
		"an interrupt alone":           {vmm.Sample{RIP: kernel + 3}, "asm_sysvec_apic_timer_interrupt"},
		"no entry on the stack":        {vmm.Sample{RIP: kernel + 1, Stack: []uint64{kernel + 6}}, "unknown"},
		"an address without a symbol":  {vmm.Sample{RIP: kernel + 99}, "unknown"},
		"no stack, in the entry alone": {vmm.Sample{RIP: kernel + 2}, "__x64_sys_read"},
	} {
		if got := profileOf().entry(tt.s); got != tt.want {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
}

func TestProfile_rows_are_those_with_a_share_the_largest_first(t *testing.T) {
	one := map[place]time.Duration{
		{byAll, ""}: 1000 * time.Millisecond, {byEntry, "__x64_sys_read"}: 400 * time.Millisecond, {byEntry, inProgram}: 595 * time.Millisecond,
		{byEntry, "kthread"}: 5 * time.Millisecond, {byFunction, "memcpy"}: 1000 * time.Millisecond,
	}
	two := map[place]time.Duration{{byAll, ""}: 500 * time.Millisecond, {byEntry, inProgram}: 500 * time.Millisecond, {byFunction, inProgram}: 500 * time.Millisecond}
	var got []string
	for _, r := range profileOf(one, two, one).rows(map[string]any{"memory_mib": 64}) {
		if r.N != 3 || r.Params["memory_mib"] != 64 || r.Unit != "ms" {
			t.Errorf("%+v", r)
		}
		in, _ := r.Params["in"].(string)
		got = append(got, r.Params["by"].(string)+" "+in)
		if in == "__x64_sys_read" && (r.P50 < 399 || r.P50 > 401) {
			t.Errorf("the median of 400, 0 and 400 is %v", r.P50)
		}
	}
	want := []string{"all ", "entry program", "entry __x64_sys_read", "function memcpy", "function program"}
	if len(got) != len(want) {
		t.Fatalf("got %q, want %q", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("row %d is %q, want %q", i, got[i], want[i])
		}
	}
}

func TestProfile_that_saw_nothing_says_so(t *testing.T) {
	rows := profileOf(map[place]time.Duration{}).rows(map[string]any{})
	if len(rows) != 1 || rows[0].Skipped == "" || rows[0].P50 != 0 {
		t.Errorf("got %+v", rows)
	}
}
