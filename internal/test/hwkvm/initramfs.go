package hwkvm

import (
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

// writeInitramfs writes an uncompressed newc archive (Documentation/driver-api/early-userspace/buffer-format.rst)
// with init, the modules and their index. It does not compress: an emulated CPU decompresses slowly, and QEMU
// loads fast.
func writeInitramfs(w io.Writer, init []byte, index wire.ModuleIndex, module func(name string) ([]byte, error)) error {
	out := cpio.Newc.Writer(w)
	records := []cpio.Record{
		cpio.Directory("dev", 0o755),
		cpio.CharDev("dev/console", 0o600, 5, 1), // the kernel opens it for init before anything is mounted
		cpio.Directory("proc", 0o755),
		cpio.Directory("sys", 0o755),
		cpio.Directory("host", 0o755),
		cpio.StaticFile("init", string(init), 0o755),
		cpio.Directory(wire.ModuleDir[1:], 0o755),
	}
	names := make([]string, 0, len(index.Modules))
	for n := range index.Modules {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		b, err := module(n)
		if err != nil {
			return fmt.Errorf("initramfs: %w", err)
		}
		records = append(records, cpio.StaticFile(path.Join(wire.ModuleDir[1:], n+".ko"), string(b), 0o644))
	}
	b, err := json.Marshal(index)
	if err != nil {
		return fmt.Errorf("initramfs: %w", err)
	}
	records = append(records, cpio.StaticFile(wire.IndexFile[1:], string(b), 0o644))
	if err := cpio.WriteRecords(out, records); err != nil {
		return fmt.Errorf("initramfs: %w", err)
	}
	if err := cpio.WriteTrailer(out); err != nil {
		return fmt.Errorf("initramfs: %w", err)
	}
	return nil
}
