package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// fetch gets a sandbox that this host does not have from its cluster.
func (h *Host) fetch(ctx context.Context, name string) error {
	if _, err := h.State.Load(name); !errors.Is(err, ErrNotFound) {
		return nil
	}
	return h.claim(ctx, name)
}

// claim makes sure that the host may run a sandbox.
func (h *Host) claim(ctx context.Context, name string) error {
	if h.Cluster == nil || !spec.ValidName(name) {
		return nil
	}
	return h.Cluster.Claim(ctx, name, nil)
}

// unshare deletes a shared sandbox. Others are left alone.
func (h *Host) unshare(ctx context.Context, name string) (shared bool, freed spec.Freed, err error) {
	if h.Cluster == nil || !spec.ValidName(name) {
		return false, freed, nil
	}
	return h.Cluster.Delete(ctx, name)
}

// elsewhere reports whether a sandbox that is not here may be on another host.
func (h *Host) elsewhere(err error) bool { return h.Cluster != nil && errors.Is(err, ErrNotFound) }

// adopt makes a sandbox of a snapshot in which it sleeps on another host: r and m are what that host knows of it.
func (h *Host) adopt(ctx context.Context, r *state.Record, m spec.Metadata, snapshotID string) error {
	man, err := h.State.ComingManifest(snapshotID)
	if err != nil {
		return err
	}
	var then state.Record
	if err := json.Unmarshal([]byte(man.Labels[state.LabelRecord]), &then); err != nil {
		return fmt.Errorf("snapshot %s: %w: %w", snapshotID, spec.ErrRecord, err)
	}
	if state.DiskOnly(man) || then.ID != r.ID || !state.IDPattern.MatchString(r.ID) {
		return fmt.Errorf("snapshot %s: %w: it is not one in which %s sleeps", snapshotID, snapshot.ErrForeign, r.Spec.Name)
	}
	boot, err := h.resolveAgain(ctx, then)
	if err != nil {
		return err
	}
	want, err := h.State.Complete(r.Spec)
	if err == nil {
		err = errors.Join(want.ValidatePolicy(), h.State.CheckVolumes(r, snapshotID))
	}
	if err != nil {
		return err
	}
	next, err := h.State.LastLayer(r.ID)
	if err != nil {
		return err
	}
	adopted, err := r.Adopted(want, boot, man, next, m)
	if err != nil {
		return err
	}
	lock, err := h.State.Create(adopted)
	if err != nil {
		return err
	}
	lock.Release()
	return nil
}
