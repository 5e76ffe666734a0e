package instance

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

// loopingInstance starts a guest that loops, without an agent.
func loopingInstance(t *testing.T) *Instance {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a guest: not in short mode")
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skipf("this host cannot run VMs: %v", err)
	}
	dir := t.TempDir()
	file := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	st, err := disk.Create(filepath.Join(dir, "disk"), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	in, err := begin(Parts{
		Spec:   spec.VM{Name: "a", VCPUs: 1, MemoryMiB: 64},
		Kernel: file("kernel", guestProgram([]byte{0xeb, 0xfe})), // jmp $
		Image:  file("image", make([]byte, 4096)), Disk: st, Socket: filepath.Join(dir, "s"), VM: "0",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := in.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := in.assemble(netOpen); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(in.machine.Boot(vmm.BootOptions{Kernel: in.parts.Kernel}), in.machine.Start()); err != nil {
		t.Fatal(err)
	}
	return in
}

// A capture waits until drowse has no copy of a secret in the guest.
func TestStandStill_waits_until_a_secret_is_wiped(t *testing.T) {
	in := loopingInstance(t)
	dev := in.machine.Secrets()
	if err := dev.Set(secrets.Secret{Name: "a"}, []byte("swordfish")); err != nil {
		t.Fatal(err)
	}
	dev.WriteIO(secrets.Select, binary.LittleEndian.AppendUint32(nil, 1))
	dev.ReadIO(secrets.Data, make([]byte, 1))

	release, _, err := in.standStill(t.Context(), time.Millisecond)
	release()
	if !errors.Is(err, spec.ErrSecrets) {
		t.Fatalf("a guest that does not say that it has wiped one: %v, want ErrSecrets", err)
	}
	type result struct {
		busy bool
		err  error
	}
	done := make(chan result)
	go func() {
		release, _, err := in.standStill(t.Context(), time.Hour)
		done <- result{dev.Busy(), err}
		release()
		done <- result{}
	}()
	// Give standStill time to see that it must wait. With less time the test still passes.
	time.Sleep(100 * time.Millisecond)
	dev.WriteIO(secrets.Wiped, []byte{1})
	if r := <-done; r.busy || r.err != nil {
		t.Errorf("it stands still, with a secret in it: %v, %v", r.busy, r.err)
	}
	<-done
	if err := in.machine.Resume(); err != nil {
		t.Errorf("it did not stand still: %v", err)
	}
}
