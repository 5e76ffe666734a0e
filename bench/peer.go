package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"
)

// Peers are the monitors that resume_ready can measure beside drowse.
var Peers = []string{peerQEMU, peerQEMUShared, peerQEMUAhead, peerFirecracker, peerFirecrackerUffd}

const (
	peerQEMU            = "qemu"
	peerQEMUShared      = "qemu-shared"
	peerQEMUAhead       = "qemu-ahead"
	peerFirecracker     = "firecracker"
	peerFirecrackerUffd = "firecracker-uffd"
)

// DefaultPeerUsedMiB gives a peer's guest about as much memory in use as drowse's own guest with its python3, or a
// little less. A monitor that reads all of the memory depends on that. The rows' field state_mib has each amount.
const DefaultPeerUsedMiB = 32

// paramUsed is the parameter of rows for how much memory a program in the guest has in use, in MiB.
const paramUsed = "used_mib"

// peer is a guest of another monitor, saved to a file.
type peer interface {
	// params describe the measurement, without the name of the peer.
	params() map[string]any
	// stateMiB is the size of the files that it resumes from.
	stateMiB() float64
	// resume starts the monitor from the file, and returns when a process in the guest has answered. The stages
	// add up to the whole. "process" is the start of the monitor's own process.
	resume(ctx context.Context) (total time.Duration, stages map[string]time.Duration, err error)
	close() error
}

// beside is a peer measured in turn with a VM of drowse.
type beside struct {
	name  string
	mib   int
	peer  peer   // nil: see why
	why   string // why it is not measured, or no longer
	runs  *series
	whole *series // the peer's time / drowse's, for each run
	bare  *series // the same, without the start of the peer's process
}

// preparePeer boots a guest of a peer and saves it. It fails only when the context has ended: the row of a peer
// that cannot run says why.
func (e Env) preparePeer(ctx context.Context, name string, mib, usedMiB int) (*beside, error) {
	b := &beside{name: name, mib: mib, runs: newSeries(inMs), whole: newSeries(inRatio), bare: newSeries(inRatio)}
	e.say("booting a guest of %d MiB in %s", mib, name)
	var err error
	switch name {
	case peerQEMU:
		b.peer, err = e.newQEMU(ctx, mib, usedMiB, qemu{})
	case peerQEMUShared:
		b.peer, err = e.newQEMU(ctx, mib, usedMiB, qemu{shared: true})
	case peerQEMUAhead:
		b.peer, err = e.newQEMU(ctx, mib, usedMiB, qemu{shared: true, ahead: true})
	case peerFirecracker, peerFirecrackerUffd:
		b.peer, err = e.newFirecracker(ctx, mib, usedMiB, name == peerFirecrackerUffd)
	default:
		err = fmt.Errorf("no such peer: %s", name)
	}
	if ctx.Err() != nil {
		return b, errors.Join(fmt.Errorf("preparing %s: %w", name, ctx.Err()), err)
	}
	if err != nil {
		b.why = err.Error()
		e.say("%s is not measured: %s", name, b.why)
	}
	return b, nil
}

// resume measures the peer once, right after drowse's run, which took the given time.
func (b *beside) resume(ctx context.Context, counts bool, drowse time.Duration) error {
	if b.why != "" {
		return nil
	}
	total, stages, err := b.peer.resume(ctx)
	if ctx.Err() != nil {
		return errors.Join(ctx.Err(), err)
	}
	if err != nil {
		b.why = fmt.Sprintf("it was resumed %d times, and then: %v", b.runs.total.TotalCount(), err)
		return nil
	}
	if !counts {
		return nil
	}
	b.runs.add(int64(total))
	b.whole.portion(float64(total), float64(drowse))
	b.bare.portion(float64(total-stages["process"]), float64(drowse))
	for name, d := range stages {
		b.runs.stage(name, int64(d))
	}
	return nil
}

// rows returns the peer's figures, and its ratio to drowse.
func (b *beside) rows(name string) []Row {
	params := map[string]any{"peer": b.name, "memory_mib": b.mib}
	if b.why != "" {
		return []Row{{Name: name, Params: params, Unit: "ms", Skipped: b.why}}
	}
	ratio := func(s *series, process string) Row {
		p := map[string]any{"peer": b.name, "memory_mib": b.mib, "peer_process": process}
		if used, ok := b.peer.params()[paramUsed]; ok {
			p[paramUsed] = used
		}
		return s.row(name+"_ratio", p)
	}
	rows := []Row{ratio(b.whole, "counted"), ratio(b.bare, "not counted")}
	maps.Copy(params, b.peer.params())
	row := b.runs.row(name, params)
	row.StateMiB = b.peer.stateMiB()
	return append([]Row{row}, rows...)
}

func (b *beside) close() error {
	if b.peer == nil {
		return nil
	}
	return b.peer.close()
}
