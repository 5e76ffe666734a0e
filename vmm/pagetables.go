package vmm

import "fmt"

// Control register bits (SDM volume 3, 2.5).
const (
	cr0Paging = 1 << 31
	cr4LA57   = 1 << 12
)

// PageTables are the root and depth of the page tables that a vCPU runs on.
type PageTables struct {
	CR3    uint64
	Levels int // 4 or 5
}

// PageTables returns the page tables of the vCPUs that have paging on. The machine must be paused.
func (m *Machine) PageTables() ([]PageTables, error) {
	m.life.Lock()
	defer m.life.Unlock()
	if m.state != paused {
		return nil, fmt.Errorf("reading the vCPUs' page tables: %w", ErrNotPaused)
	}
	var out []PageTables
	for _, c := range m.cpus {
		s, err := c.kvm.Sregs()
		if err != nil {
			return nil, fmt.Errorf("reading the page tables of vCPU %d: %w", c.kvm.ID(), err)
		}
		if s.CR0&cr0Paging == 0 {
			continue // the guest has not started it yet
		}
		t := PageTables{CR3: s.CR3, Levels: 4}
		if s.CR4&cr4LA57 != 0 {
			t.Levels = 5
		}
		out = append(out, t)
	}
	return out, nil
}
