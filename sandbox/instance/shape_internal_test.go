package instance

import (
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/balloon"
	"github.com/drowse-vm/drowse/devices/blk"
	"github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/devices/vsock"
)

// Otherwise a wake makes the missing eventfds itself, which costs time unnoticed.
func TestQueuesAhead_are_those_of_the_devices_of_a_VM(t *testing.T) {
	t.Parallel()
	disk := &blk.Device{}
	var want []int
	for _, d := range []devices.Device{disk, disk, disk, &vsock.Device{}, rng.New(rng.Options{}), balloon.New(nil, balloon.Options{}), &net.Device{}} {
		want = append(want, len(d.QueueSizes()))
	}
	if !slices.Equal(queuesAhead, want) {
		t.Errorf("%v are made ahead, the devices have %v", queuesAhead, want)
	}
}
