package vmm

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/vmm/kvm"
)

func TestAttack_snapshot_of_a_CPU_with_features_of_later_leaves_is_refused_before_it_runs(t *testing.T) {
	host := func() []kvm.CPUIDEntry {
		return []kvm.CPUIDEntry{
			entry(0, 0, 0x20, 1, 2, 3), entry(1, 0, 0, 0, 1<<26, 1), entry(7, 0, 2, 0, 0, 0), entry(7, 1, 0, 0, 0, 0), entry(7, 2, 0, 0, 0, 0),
			entry(0xd, 0, 0xe7, 0, 0, 0), entry(0xd, 1, 1, 0, 0, 0),
			entry(0x80000007, 0, 0, 0, 0, 0), entry(0x80000008, 0, 0x302e, 0, 0, 0), entry(0x80000021, 0, 0, 0, 0, 0),
		}
	}
	set := func(function, index uint32, change func(*kvm.CPUIDEntry)) []kvm.CPUIDEntry {
		l := host()
		i := slices.IndexFunc(l, func(e kvm.CPUIDEntry) bool { return e.Function == function && e.Index == index })
		change(&l[i])
		return l
	}
	for name, tt := range map[string]struct {
		saved, have []kvm.CPUIDEntry
		says        string // empty: it may run
	}{
		"the same CPU":                   {host(), host(), ""},
		"a bit of 7.1 EAX":               {set(7, 1, func(e *kvm.CPUIDEntry) { e.EAX = 1 << 10 }), host(), "7.1:EAX"},
		"a bit of 7.1 EBX":               {set(7, 1, func(e *kvm.CPUIDEntry) { e.EBX = 1 }), host(), "7.1:EBX"},
		"a bit of 7.1 EDX":               {set(7, 1, func(e *kvm.CPUIDEntry) { e.EDX = 1 << 14 }), host(), "7.1:EDX"},
		"a bit of 7.2 EDX":               {set(7, 2, func(e *kvm.CPUIDEntry) { e.EDX = 1 }), host(), "7.2:EDX"},
		"a bit of XCR0 beyond 31":        {set(0xd, 0, func(e *kvm.CPUIDEntry) { e.EDX = 1 << 30 }), host(), "D.0:EDX"},
		"a bit of XSS":                   {set(0xd, 1, func(e *kvm.CPUIDEntry) { e.ECX = 1 << 11 }), host(), "D.1:ECX"},
		"an invariant TSC":               {set(0x80000007, 0, func(e *kvm.CPUIDEntry) { e.EDX = 1 << 8 }), host(), "80000007:EDX"},
		"a bit of 80000008 EBX":          {set(0x80000008, 0, func(e *kvm.CPUIDEntry) { e.EBX = 1 << 12 }), host(), "80000008:EBX"},
		"a bit of 80000021 EAX":          {set(0x80000021, 0, func(e *kvm.CPUIDEntry) { e.EAX = 1 << 8 }), host(), "80000021:EAX"},
		"wider physical addresses":       {set(0x80000008, 0, func(e *kvm.CPUIDEntry) { e.EAX = 0x3034 }), host(), "physical addresses of 52 bits"},
		"wider linear addresses":         {set(0x80000008, 0, func(e *kvm.CPUIDEntry) { e.EAX = 0x392e }), host(), "linear addresses of 57 bits"},
		"narrower addresses":             {set(0x80000008, 0, func(e *kvm.CPUIDEntry) { e.EAX = 0x3024 }), host(), ""},
		"a host with more":               {host(), set(7, 1, func(e *kvm.CPUIDEntry) { e.EAX = 1 << 10 }), ""},
		"a guest that has not seen them": {host()[:3], host(), ""},
	} {
		err := compareCPUID(tt.saved, tt.have)
		if tt.says == "" && err != nil || tt.says != "" && (!errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), tt.says)) {
			t.Errorf("%s: got %v, want an error that says %q", name, err, tt.says)
		}
	}
}

func TestAttack_snapshot_of_a_host_with_another_TSC_is_refused_before_it_runs(t *testing.T) {
	for name, tt := range map[string]struct {
		saved, host uint64
		scales      bool
		ok          bool
	}{
		"the same":                      {2_500_000, 2_500_000, false, true},
		"as far off as NTP corrects":    {2_500_000, 2_500_625, false, true},
		"farther":                       {2_500_000, 2_500_626, false, false},
		"a faster guest":                {3_000_000, 2_500_000, false, false},
		"a slower guest":                {2_000_000, 2_500_000, false, false},
		"a host that scales":            {3_000_000, 2_500_000, true, true},
		"a rate that nobody has noted":  {0, 2_500_000, false, true},
		"a host that cannot tell":       {2_500_000, 0, false, true},
		"a rate that overflows a check": {1<<64 - 1, 2_500_000, false, false},
	} {
		if err := compareTSC(tt.saved, tt.host, tt.scales); (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrForeign) {
			t.Errorf("%s: got %v, want it to be let in: %v", name, err, tt.ok)
		}
	}
}
