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
	mutex.Lock()
	defer mutex.Unlock()
	if request.Method != http.MethodPost {
		respond(response, http.StatusOK, len(orders))
		return
	}
	item, err := io.ReadAll(request.Body)
	if err != nil {
		respond(response, http.StatusBadRequest, "incomplete")
		return
	}
	orders = append(orders, string(item))
	if string(item) == "crash" {
		// The server closes the connection without a response.
		panic(http.ErrAbortHandler)
	}
	respond(response, http.StatusCreated, map[string]any{"order": len(orders), "item": string(item)})
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
