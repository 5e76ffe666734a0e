package mmio

import (
	"errors"
	"testing"
	"time"
)

// If a device cannot start because of the host, for want of file descriptors for example, a driver can repeat that
// as fast as it resets the device. The owner hears of the first failures, then of one per ErrorEvery and how many
// there were.
func TestAttack_failure_of_the_host_that_a_driver_repeats_is_told_a_few_times(t *testing.T) {
	const rounds = 100_000
	dev := &plain{activateErr: errors.New("no file descriptors")}
	m := newMachine(t, dev)
	begin := time.Now()
	for range rounds {
		m.write(regStatus, 0)
		m.write(regStatus, statusAcknowledge)
		m.write(regStatus, statusAcknowledge|statusDriver)
		m.write(regDriverFeaturesSel, 1)
		m.write(regDriverFeatures, uint32(FeatureVersion1>>32))
		m.write(regStatus, statusAcknowledge|statusDriver|statusFeaturesOK)
		m.write(regStatus, statusAcknowledge|statusDriver|statusFeaturesOK|statusDriverOK)
	}
	most := ErrorBurst + int(time.Since(begin)/ErrorEvery) + 1
	m.mu.Lock()
	defer m.mu.Unlock()
	if dev.activations != rounds || len(m.told) == 0 || len(m.told) > most {
		t.Errorf("%d starts failed, of which the owner was told %d times, want 1 to %d", dev.activations, len(m.told), most)
	}
}

func TestErrorBound_tells_a_burst_then_one_at_a_time_and_how_many_it_left_out(t *testing.T) {
	var b errorBound
	now := time.Now()
	told := 0
	for range 1000 {
		if ok, _ := b.take(now); ok {
			told++
		}
	}
	if told != ErrorBurst {
		t.Fatalf("%d of a burst were told", told)
	}
	ok, untold := b.take(now.Add(ErrorEvery))
	if !ok || untold != 1000-ErrorBurst {
		t.Errorf("after a while: %t, %d were left out", ok, untold)
	}
	if ok, _ := b.take(now.Add(ErrorEvery)); ok {
		t.Error("two were told after the time of one")
	}
}
