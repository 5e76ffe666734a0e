//go:build versitygw

package cluster_test

import (
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/s3server"
)

// Each host has a bad network of its own before one server.
func TestCrash_of_hosts_of_a_bucket_behind_a_network_loses_no_sandbox_and_runs_none_twice(t *testing.T) {
	server := s3server.Start(t)
	var urls [2]string
	var nets [2]s3server.Network
	for i := range nets {
		n := &nets[i]
		n.RTT.Store(int64(5 * time.Millisecond))
		n.BytesPerSec.Store(100e6)
		for _, p := range []interface{ Store(int64) }{&n.Refused, &n.LostAsk, &n.LostDone, &n.Cut} {
			p.Store(10)
		}
		urls[i] = n.Stand(t, server)
	}
	crashes(t, urls, kills(t))
}
