//go:build versitygw

package archive_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/drowse-vm/drowse/internal/test/s3server"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob/s3"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// A bucket 20 ms away at 100 MB/s that is busy for one request in a hundred, and a network that breaks as often.
func TestSnapshot_goes_by_a_bucket_behind_a_network(t *testing.T) {
	var net s3server.Network
	server, err := s3.Open(s3.Options{
		Endpoint: net.Stand(t, s3server.Start(t)), Region: s3server.Region, Bucket: s3server.Bucket, Prefix: "fleet/eu", PathStyle: true,
		Credentials: credentials.NewStaticV4(s3server.AccessKey, s3server.SecretKey, ""),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	a := archive.Open(server)
	net.RTT.Store(int64(20 * time.Millisecond))
	net.BytesPerSec.Store(100e6)
	for _, p := range []interface{ Store(int64) }{&net.Refused, &net.LostAsk, &net.LostDone, &net.Cut} {
		p.Store(10)
	}
	fmt.Println("| | time | requests | GET | PUT | bytes got |\n|---|---|---|---|---|---|")
	step := func(what string, do func()) {
		for _, n := range []interface{ Store(int64) }{&net.Requests, &net.Gets, &net.Puts, &net.Sent} {
			n.Store(0)
		}
		begin := time.Now()
		do()
		fmt.Printf("| %s | %v | %d | %d | %d | %d |\n", what, time.Since(begin).Round(time.Millisecond), net.Requests.Load(), net.Gets.Load(), net.Puts.Load(), net.Sent.Load())
	}
	from, to := newHost(t), newHost(t)
	id := asleep(t, from)
	takeFacts(t, from, id)
	loseImages(t, to)
	step("push with image", func() {
		if _, err := a.Push(t.Context(), from.State, id, nil); err != nil {
			t.Fatal(err)
		}
	})
	step("pull with image", func() {
		if _, err := a.Pull(t.Context(), to.State, id, state.ImportOptions{}, nil); err != nil {
			t.Fatal(err)
		}
	})
	b, err := to.Clone(t.Context(), id, sandbox.CloneOptions{Name: "arrived"})
	if err != nil {
		t.Fatal(err)
	}
	if n := count(t, b); n != "3" {
		t.Errorf("it counts on to %s, want 3", n)
	}
	step("remove", func() {
		if err := a.Remove(t.Context(), archive.Snapshots, id); err != nil {
			t.Fatal(err)
		}
	})
}
