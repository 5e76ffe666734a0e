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

func TestRequests_of_IPv6_have_the_kernels_layout(t *testing.T) {
	var a in6Ifreq
	var rt in6Rtmsg
	for _, tt := range []struct {
		name      string
		got, want uintptr
	}{ // linux/ipv6.h and linux/ipv6_route.h, x86-64
		{"size of in6_ifreq", unsafe.Sizeof(a), 24},
		{"ifr6_prefixlen", unsafe.Offsetof(a.prefixLen), 16},
		{"ifr6_ifindex", unsafe.Offsetof(a.index), 20},
		{"size of in6_rtmsg", unsafe.Sizeof(rt), 80},
		{"rtmsg_gateway", unsafe.Offsetof(rt.gateway), 32},
		{"rtmsg_type", unsafe.Offsetof(rt.kind), 48},
		{"rtmsg_dst_len", unsafe.Offsetof(rt.dstLen), 52},
		{"rtmsg_metric", unsafe.Offsetof(rt.metric), 56},
		{"rtmsg_info", unsafe.Offsetof(rt.info), 64},
		{"rtmsg_flags", unsafe.Offsetof(rt.flags), 72},
		{"rtmsg_ifindex", unsafe.Offsetof(rt.index), 76},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, tt.got, tt.want)
		}
	}
}
