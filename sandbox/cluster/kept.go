package cluster

import (
	"context"
	"encoding/json"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
)

// A sleep publishes only what the store lacks: most of a sandbox's memory and disk is as it was when it slept before.
// What the store has is noted here, since it is known by what files on this host are like. A note that is lost costs an
// upload.

const maxKept = 1 << 20 // bytes of a note

// kept is the note of a sandbox.
type kept struct {
	Seal  blob.Seal      `json:"seal"`
	Files []archive.Kept `json:"files"`
}

// keptFiles returns what the store has of a sandbox that is sealed in a way.
func (n *Node) keptFiles(name string, by blob.Seal) []archive.Kept {
	data, err := osfile.ReadPrivate(n.dir.KeptPath(name), maxKept)
	var k kept
	if err != nil || json.Unmarshal(data, &k) != nil || k.Seal != by {
		return nil
	}
	return k.Files
}

// keepFiles notes what the store has of a sandbox. Without a note the next head has all of it again.
func (n *Node) keepFiles(name string, by blob.Seal, files []archive.Kept) {
	data, err := json.Marshal(kept{by, files})
	if err == nil && len(data) <= maxKept {
		err = osfile.WriteFile(n.dir.KeptPath(name), data, 0o600)
	}
	if err != nil {
		n.log.Warn("noting what the store has of a sandbox: its next sleep is published whole", "sandbox", name, "error", err)
	}
}

// keepArrived notes the files of a head that have arrived, unless a newer head has been published.
func (n *Node) keepArrived(ctx context.Context, e *arriving) {
	files, by, err := e.a.Kept(ctx, n.state)
	if err != nil {
		n.log.Warn("noting what the store has of a sandbox: its next sleep is published whole", "sandbox", e.name, "error", err)
		return
	}
	if c, err := n.dir.Claim(e.name); err == nil && c != nil && (c.Head == e.head || c.Claiming) {
		n.keepFiles(e.name, by, files)
	}
}
