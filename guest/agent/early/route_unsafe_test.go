package early

import (
	"testing"
	"unsafe"
)

func TestRtentry_has_the_kernels_layout(t *testing.T) {
	var rt rtentry
	for _, tt := range []struct {
		name      string
		got, want uintptr
	}{ // struct rtentry of linux/route.h, x86-64
		{"size", unsafe.Sizeof(rt), 120},
		{"rt_dst", unsafe.Offsetof(rt.dst), 8},
		{"rt_gateway", unsafe.Offsetof(rt.gateway), 24},
		{"rt_genmask", unsafe.Offsetof(rt.genmask), 40},
		{"rt_flags", unsafe.Offsetof(rt.flags), 56},
		{"rt_metric", unsafe.Offsetof(rt.metric), 80},
		{"rt_dev", unsafe.Offsetof(rt.dev), 88},
		{"rt_irtt", unsafe.Offsetof(rt.irtt), 112},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, tt.got, tt.want)
		}
	}
}
