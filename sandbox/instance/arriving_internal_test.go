package instance

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/devices"
)

// A VM asks for each piece of a layer once, and for none of a layer that is there.
func TestComing_layers_are_asked_for_by_pieces_and_never_answered_with_an_error(t *testing.T) {
	type ask struct {
		file   string
		off, n int64
	}
	var asked []ask
	var err error
	const size = 3*arrivingPiece + 100
	in := &Instance{log: slog.New(slog.DiscardHandler), assembled: make(chan struct{}), parts: Parts{Arriving: &Arriving{
		Layers: map[string]int64{"comes": size},
		Ensure: func(_ context.Context, file string, off, n int64) error {
			asked = append(asked, ask{file, off, n})
			return err
		},
	}}}
	close(in.assembled)
	in.awaited = newAwaited(in.parts.Arriving)
	if in.coming("/layers/is-here") != nil {
		t.Error("it waits for a layer that is there")
	}
	await := in.coming("/layers/comes")
	if await == nil {
		t.Fatal("it does not wait for a layer that is on its way")
	}
	for _, r := range [][2]int64{{arrivingPiece - 1, 2}, {0, size}, {size - 1, 1}} {
		if err := await(r[0], r[1]); err != nil {
			t.Error(err)
		}
	}
	want := []ask{{"comes", 0, arrivingPiece}, {"comes", arrivingPiece, arrivingPiece}, {"comes", 2 * arrivingPiece, arrivingPiece}, {"comes", 3 * arrivingPiece, 100}}
	if !slices.Equal(asked, want) {
		t.Errorf("it asked for %v, want %v", asked, want)
	}
	in.awaited = newAwaited(in.parts.Arriving)
	err = errors.New("the store is away")
	if got := await(0, 1); !errors.Is(got, devices.ErrLater) || !errors.Is(got, err) {
		t.Errorf("the disk is told %v", got)
	}
	in.Arrived()
	if err := await(0, 1); err != nil {
		t.Error("when all is there:", err)
	}
	other := &Instance{}
	if other.coming("/layers/comes") != nil {
		t.Error("a VM waits for layers, and nothing is on its way")
	}
}
