package sandbox

import (
	"context"
	"encoding/json"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Inspect returns all that is known about a VM, as one JSON object.
func (b *Sandbox) Inspect(ctx context.Context) (json.RawMessage, error) {
	s, name := b.host, b.name
	r, err := s.State.Get(name)
	if err != nil {
		return nil, err
	}
	out := struct {
		*state.Record
		Live   *control.Info    `json:"live,omitempty"`
		Usage  int64            `json:"disk_bytes"`
		Layers map[string]int64 `json:"layer_bytes"`
		// Abandoned are the snapshots of disks that the VM left when it was taken back.
		Abandoned []string `json:"abandoned,omitempty"`
	}{Record: r}
	if r.Phase == state.Running {
		if info, err := b.Info(ctx); err == nil {
			out.Live = &info
		}
	}
	if out.Layers, out.Abandoned, err = s.State.DisksOf(ctx, r); err != nil {
		return nil, err
	}
	for _, size := range out.Layers {
		out.Usage += size
	}
	return json.MarshalIndent(out, "", "  ")
}
