// castiron emit --kernel gemm_few --shape 16x64 --codec q4_0 --tokens 2 --isa avx2 --threads 2
// 642 lines, sha256 75f9e2fc264930ea302f7740667f572f5e36c9593bec20752d326d6fc3d96b6a
              scf.for %57 = %c0 to %c2 step %c2 {
                %59 = arith.subi %55, %c0 : index
                %60 = arith.muli %59, %c3 : index
                %61 = arith.addi %53, %c2 : index
                %62 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%62, %55, %c0], read, locality<3>, data : memref<1x2x288xi8>
                %63 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%63, %55, %c10], read, locality<3>, data : memref<1x2x288xi8>
                %64 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%64, %55, %c11], read, locality<3>, data : memref<1x2x288xi8>
                %65 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%65, %55, %c12], read, locality<3>, data : memref<1x2x288xi8>
                %66 = arith.addi %48, %c2 : index
                memref.prefetch %m1[%66, %55, %c13], read, locality<3>, data : memref<1x2x288xi8>
                %67 = memref.load %2[%53, %59] : memref<2x2xf32>
                %68 = vector.broadcast %67 : f32 to vector<8xf32>
                %69 = memref.load %2[%61, %59] : memref<2x2xf32>
                %70 = vector.broadcast %69 : f32 to vector<8xf32>
                %71 = vector.load %m1[%48, %55, %c3] : memref<1x2x288xi8>, vector<32xi8>
                %72 = vector.bitcast %71 : vector<32xi8> to vector<8xi32>
                %73 = arith.andi %72, %c14 : vector<8xi32>
                %74 = arith.sitofp %73 : vector<8xi32> to vector<8xf32>
                %75 = vector.load %m1[%48, %55, %c10] : memref<1x2x288xi8>, vector<32xi8>
                %76 = vector.bitcast %75 : vector<32xi8> to vector<8xi32>
                %77 = arith.andi %76, %c14 : vector<8xi32>
                %78 = arith.sitofp %77 : vector<8xi32> to vector<8xf32>
                %79 = memref.load %1[%53, %60] : memref<2x80xf32>
                %80 = vector.broadcast %79 : f32 to vector<8xf32>
                %81 = math.fma %74, %80, %68 : vector<8xf32>
                %82 = math.fma %78, %80, %68 : vector<8xf32>
                %83 = memref.load %1[%61, %60] : memref<2x80xf32>
                %84 = vector.broadcast %83 : f32 to vector<8xf32>
                %85 = math.fma %74, %84, %70 : vector<8xf32>
                %86 = math.fma %78, %84, %70 : vector<8xf32>
                %87 = arith.andi %72, %c15 : vector<8xi32>
                %88 = arith.sitofp %87 : vector<8xi32> to vector<8xf32>
                %89 = arith.andi %76, %c15 : vector<8xi32>
                %90 = arith.sitofp %89 : vector<8xi32> to vector<8xf32>
                %91 = arith.addi %60, %c2 : index
                %92 = memref.load %1[%53, %91] : memref<2x80xf32>
// 444 lines more
                %537 = math.fma %526, %535, %536 : vector<8xf32>
                vector.store %537, %3[%53, %51] : memref<2x16xf32>, vector<8xf32>
                %538 = vector.load %3[%61, %51] : memref<2x16xf32>, vector<8xf32>
                %539 = math.fma %531, %535, %538 : vector<8xf32>
                vector.store %539, %3[%61, %51] : memref<2x16xf32>, vector<8xf32>
                %540 = vector.load %m1[%48, %55, %c6] : memref<1x2x288xi8>, vector<16xi8>
                %541 = vector.bitcast %540 : vector<16xi8> to vector<8xf16>
                %542 = arith.extf %541 : vector<8xf16> to vector<8xf32>
                %543 = vector.load %3[%53, %52] : memref<2x16xf32>, vector<8xf32>
                %544 = math.fma %527, %542, %543 : vector<8xf32>
                vector.store %544, %3[%53, %52] : memref<2x16xf32>, vector<8xf32>
                %545 = vector.load %3[%61, %52] : memref<2x16xf32>, vector<8xf32>
                %546 = math.fma %532, %542, %545 : vector<8xf32>
                vector.store %546, %3[%61, %52] : memref<2x16xf32>, vector<8xf32>
              }
