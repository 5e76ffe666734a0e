package secrets

import "testing"

func TestStore_tells_those_who_wait_for_a_value(t *testing.T) {
	var s Store
	defer s.Close()
	for _, step := range []func() error{
		func() error { return s.Await(Secret{Name: "key"}) }, // it changes something, and the value has not come
		func() error { return s.Set(Secret{Name: "key"}, []byte("value")) },
	} {
		value, ok, changed := s.Secret("key")
		if ok || value != "" || changed == nil {
			t.Fatalf("before it came: %q, %t, %v", value, ok, changed)
		}
		if err := step(); err != nil {
			t.Fatal(err)
		}
		<-changed
	}
	if value, ok, _ := s.Secret("key"); !ok || value != "value" {
		t.Errorf("got %q, %t", value, ok)
	}
	if !s.Remove("key") || s.Remove("key") {
		t.Error("Remove does not say whether it was there")
	}
	_, ok, changed := s.Secret("key")
	if ok {
		t.Error("it is there after it was removed")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	<-changed
}
