package netpolicy

import (
	"net/netip"
	"slices"
	"testing"
)

func TestHostAddresses_are_also_those_that_reach_all_sockets(t *testing.T) {
	for of, want := range map[string][]string{
		"192.168.1.10/24":   {"192.168.1.10", "192.168.1.0", "192.168.1.255"},
		"172.17.0.1/16":     {"172.17.0.1", "172.17.0.0", "172.17.255.255"},
		"10.0.0.1/31":       {"10.0.0.1"},
		"10.0.0.1/32":       {"10.0.0.1"},
		"198.51.100.9/29":   {"198.51.100.9", "198.51.100.8", "198.51.100.15"},
		"2001:db8:1::1/64":  {"2001:db8:1::1", "2001:db8:1::"},
		"2001:db8:1::1/128": {"2001:db8:1::1"},
	} {
		var got []string
		for _, a := range deliveredTo(netip.MustParsePrefix(of)) {
			got = append(got, a.String())
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", of, got, want)
		}
	}
}
