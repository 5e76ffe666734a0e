package layers

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	dictmax "github.com/mikelolasagasti/xz"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

func TestUnpack_bombs_are_stopped(t *testing.T) {
	// Consecutive gzip members are one stream.
	const member = 1 << 20
	zip := imagetest.Pack(t, "gzip", make([]byte, member))
	bomb := func(n int64) io.Reader { return bytes.NewReader(bytes.Repeat(zip, int(n/member))) }
	u, err := Unpack(bomb(freeBytes+1<<20), false, 1<<62)
	imagetest.Must(t, err)
	if n, err := io.Copy(io.Discard, u); !errors.Is(err, image.ErrTooLarge) || n < freeBytes {
		t.Errorf("by its ratio: %v after %d bytes", err, n)
	}
	u, err = Unpack(bomb(3<<20), false, 1<<20)
	imagetest.Must(t, err)
	if n, err := io.Copy(io.Discard, u); !errors.Is(err, image.ErrTooLarge) || n > 2<<20 {
		t.Errorf("by its length: %v after %d bytes", err, n)
	}
	// Unpack refuses histories above the bound before it allocates them: 2 GiB of zstd (window descriptor 0xa8),
	// and 1.5 GiB of xz (dictionary size 37 of the LZMA2 filter).
	crc := func(b string) string {
		return string(binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE([]byte(b))))
	}
	flags, block := "\x00\x01", "\x02\x00\x21\x01\x25\x00\x00\x00"
	for s, want := range map[string]error{
		"\x28\xb5\x2f\xfd\x00\xa8" + strings.Repeat("\x00", 100):                               zstd.ErrWindowSizeExceeded,
		"\xfd7zXZ\x00" + flags + crc(flags) + block + crc(block) + strings.Repeat("\x00", 100): dictmax.ErrMemlimit,
	} {
		u, err := Unpack(strings.NewReader(s), true, 1<<40)
		if err == nil {
			_, err = io.Copy(io.Discard, u)
		}
		if !errors.Is(err, image.ErrBadArchive) || !errors.Is(err, want) {
			t.Errorf("a history: %v, want %v", err, want)
		}
	}
}
