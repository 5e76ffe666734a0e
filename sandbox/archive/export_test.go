package archive

import (
	"context"
	"errors"
	"io"

	"github.com/drowse-vm/drowse/rootfs/disk"
)

// CheckLayer fails unless the layer at path is one of a head.
func CheckLayer(ctx context.Context, h *Head, path string) error {
	if err := h.e.readIndexes(ctx); err != nil {
		return err
	}
	err := errors.New("the head has no layer")
	for i, f := range h.e.m.Files {
		if !f.Extra {
			continue
		}
		r, w := io.Pipe()
		go func() { w.CloseWithError(disk.Pack(ctx, w, path)) }()
		if err = h.e.indexes[i].same(r, io.Discard); err == nil {
			if _, rerr := r.Read(make([]byte, 1)); rerr == io.EOF {
				return nil
			}
		}
		r.Close()
	}
	return err
}
