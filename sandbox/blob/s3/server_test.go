//go:build versitygw

package s3

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/drowse-vm/drowse/internal/test/s3server"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/blob/blobtest"
)

func open(t *testing.T, url, prefix string) *Store {
	t.Helper()
	s, err := Open(Options{
		Endpoint: url, Region: s3server.Region, Bucket: s3server.Bucket, Prefix: prefix, PathStyle: true,
		Credentials: credentials.NewStaticV4(s3server.AccessKey, s3server.SecretKey, ""),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func TestStore_on_a_real_server_is_one(t *testing.T) {
	url, n := s3server.Start(t), 0
	blobtest.Test(t, blobtest.Options{Objects: 1100}, func(t *testing.T) (s, other blob.Store) {
		n++
		prefix := fmt.Sprintf("pre/fix-%d", n)
		return open(t, url, prefix), open(t, url, prefix)
	})
}

// Whatever the network does, a put object is whole or not there, and swaps do not get lost.
func TestStore_behind_a_bad_network_does_what_it_says(t *testing.T) {
	var net s3server.Network
	url := net.Stand(t, s3server.Start(t))
	s := open(t, url, "bad")
	const workers, each = 4, 15
	body := func(w, i int) []byte { return bytes.Repeat([]byte{byte(w), byte(i), 7}, 50_000) }
	net.RTT.Store(int64(2 * time.Millisecond))
	for _, p := range []interface{ Store(int64) }{&net.Refused, &net.LostAsk, &net.LostDone, &net.Cut} {
		p.Store(40)
	}
	_, err := s.Swap(t.Context(), "head", "", []byte("begin"))
	if err != nil && !errors.Is(err, blob.ErrChanged) {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				key := fmt.Sprintf("o/%d-%d", w, i)
				if err := s.Put(t.Context(), key, body(w, i)); err != nil && !errors.Is(err, blob.ErrExists) {
					t.Error(err)
				}
				p := make([]byte, 100_000)
				if err := s.ReadAt(t.Context(), key, p, 17); err != nil || !bytes.Equal(p, body(w, i)[17:100_017]) {
					t.Errorf("%s: other bytes, %v", key, err)
				}
				// Each appends its mark once; after an answer of which it cannot be sure it looks.
				mark := fmt.Sprintf(" %d-%d", w, i)
				for done := false; !done; {
					have, v, err := s.Load(t.Context(), "head", 1<<20)
					if err != nil {
						t.Error(err)
						return
					}
					if done = bytes.Contains(have, []byte(mark+" ")) || bytes.HasSuffix(have, []byte(mark)); done {
						break
					}
					_, err = s.Swap(t.Context(), "head", v, append(have, mark...))
					if err != nil && !errors.Is(err, blob.ErrChanged) {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	have, _, err := s.Load(t.Context(), "head", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if marks := bytes.Count(have, []byte(" ")); marks != workers*each {
		t.Errorf("%d marks, want %d: %s", marks, workers*each, have)
	}
	t.Logf("%d requests", net.Requests.Load())
}
