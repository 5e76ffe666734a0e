package snapshot

import "testing"

func TestPrepared_decoders_come_first_and_are_bounded(t *testing.T) {
	defer func() {
		for len(prepared) > 0 {
			<-prepared
		}
	}()
	if err := PrepareDecoders(2); err != nil {
		t.Fatal(err)
	}
	if err := PrepareDecoders(2); err != nil || len(prepared) != 2 {
		t.Fatalf("%d decoders after asking twice for two: %v", len(prepared), err)
	}
	seen := map[*Decoder]bool{}
	for range 3 {
		d, err := NewDecoder()
		if err != nil {
			t.Fatal(err)
		}
		if seen[d] {
			t.Error("two users have one decoder")
		}
		seen[d] = true
	}
	if len(prepared) != 0 {
		t.Errorf("%d prepared decoders were passed over", len(prepared))
	}
	for d := range seen {
		d.Release()
	}
	if len(prepared) != 0 {
		t.Error("a decoder that is given back is kept for ever")
	}
	if err := PrepareDecoders(1000); err != nil || len(prepared) != MaxPrepared {
		t.Errorf("%d decoders of 1,000, want %d: %v", len(prepared), MaxPrepared, err)
	}
}
