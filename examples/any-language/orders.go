// The service of orders.py in Go: go run orders.go [PORT]
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"unicode/utf8"
)

var (
	mutex  sync.Mutex
	orders []string
)

func respond(response http.ResponseWriter, status int, value any) {
	response.Header().Set("Content-Type", "application/json")
	response.WriteHeader(status)
	body, _ := json.Marshal(value)
	response.Write(body)
}

func serve(response http.ResponseWriter, request *http.Request) {
	if request.Method != http.MethodPost && request.Method != http.MethodPatch {
		mutex.Lock()
		count := len(orders)
		mutex.Unlock()
		respond(response, http.StatusOK, count)
		return
	}
	if request.URL.Path != "/orders" && request.URL.Path != "/orders/rush" {
		respond(response, http.StatusNotFound, "unknown path")
		return
	}
	// The lock is not held yet, because a client that sends slowly must not stop other clients.
	item, err := io.ReadAll(request.Body)
	if err != nil || !utf8.Valid(item) {
		respond(response, http.StatusBadRequest, "expected text")
		return
	}
	mutex.Lock()
	orders = append(orders, string(item))
	order := len(orders)
	mutex.Unlock()
	if string(item) == "crash" {
		// The server closes the connection without a response.
		panic(http.ErrAbortHandler)
	}
	respond(response, http.StatusCreated, map[string]any{"order": order, "item": string(item)})
}

func main() {
	port := "3000"
	if len(os.Args) > 1 {
		port = os.Args[1]
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		panic(err)
	}
	fmt.Printf("listening on %s\n", listener.Addr())
	panic(http.Serve(listener, http.HandlerFunc(serve)))
}
